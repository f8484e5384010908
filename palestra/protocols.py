"""Every seam of Palestra on one page. What stands on either side of a seam knows only these protocols."""

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from palestra.config import Loss
from palestra.message import Message
from palestra.tool import Schema
from palestra.trajectory import Completion, FinishReason, Sample, Segment, Stage, Turn


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a completion is drawn. Logprobs are those of this distribution: log softmax(logits / temperature)."""

    temperature: float = 1.0
    max_tokens: int = 512
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a sampler can hold at once, where it knows."""

    kv_tokens: int


class Session(Protocol):
    """One rollout's line to the sampler. Between calls the sampler may keep what it computed for the tokens so far."""

    async def sample(self, tokens: Sequence[int], sampling: Sampling) -> Completion: ...


class Sampler(Protocol):
    """Writes tokens. It owns its cache, and forgets a session's when the session ends."""

    @property
    def capacity(self) -> Capacity | None: ...

    def session(self, seed: int, expected_tokens: int) -> AbstractAsyncContextManager[Session]: ...


class Trainer(Protocol):
    """Takes gradients. They are summed by `accumulate` and normalised once, at `step`."""

    @property
    def version(self) -> int:
        """The policy version that the sampler has."""

    async def accumulate(self, samples: Sequence[Sample], loss: Loss) -> None:
        """Add the samples' gradients. All samples of one step have the same loss."""

    async def step(self, learning_rate: float) -> Mapping[str, float]:
        """Apply what was accumulated; say what it measured."""

    async def discard(self) -> None:
        """Forget what was accumulated."""

    async def publish(self) -> int:
        """Give the sampler the present weights as the next policy version."""

    async def logprobs(self, samples: Sequence[Sample], temperature: float) -> list[list[float]]:
        """For each sample, the logprob of each token given those before it (0 for the first)."""

    async def save(self, folder: Path) -> None:
        """Write all that `load` needs to go on as if nothing had happened."""

    async def load(self, folder: Path) -> None: ...

    async def export(self, folder: Path) -> None:
        """Write the weights (or the adapter) in the form that other tools load."""


class Renderer(Protocol):
    """Turns messages into tokens and back, for one model family."""

    @property
    def stop_ids(self) -> frozenset[int]: ...

    def prompt(self, messages: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        """The tokens that begin a segment, up to where the model's reply starts."""

    def follow(self, finish: FinishReason, messages: Sequence[Message]) -> list[int]:
        """The tokens between a reply and the next: the rest of its closing (all of it when it was cut), the messages,
        and the opening of the next reply. The reply itself is never rendered again."""

    def parse(self, tokens: Sequence[int]) -> Message:
        """What a reply says and calls. A call that cannot be read carries its fault."""

    def reply(self, message: Message) -> list[int]:
        """An assistant's message as the model should write it, with its stop token: a target for supervised training."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The tokens as text, markers included, for people to read."""


class Policy(Protocol):
    """All that the agent loop knows of a model."""

    @property
    def segments(self) -> list[Segment]: ...

    async def begin(self, messages: Sequence[Message], tools: Sequence[Schema]) -> None: ...

    async def act(self) -> Turn | None:
        """The next reply, or None when the context has no room for one."""

    async def observe(self, messages: Sequence[Message]) -> None: ...


class Policies(Protocol):
    """What a backend gives to whoever collects: a policy for each rollout."""

    @property
    def capacity(self) -> Capacity | None: ...

    def open(self, seed: int, sampling: Sampling, context: int) -> AbstractAsyncContextManager[Policy]: ...


class StagedRollout(Protocol):
    """What a dispatcher moves: it records a failure instead of raising it, and says what comes next."""

    @property
    def next(self) -> Stage | None:
        """The stage that comes next; None when it has ended."""

    @property
    def rest(self) -> float:
        """Seconds to wait before that: the back-off after a failure."""

    @property
    def kin(self) -> Hashable:
        """Attempts at the same task have the same: what they cost is alike."""

    @property
    def group(self) -> Hashable:
        """Rollouts that are of use only together have the same."""

    @property
    def expected_tokens(self) -> int:
        """What its run may come to hold in the sampler."""

    async def may_run(self) -> bool:
        """Wait until its run may start, which is when the policy that it is for has been published; False when that will
        never be."""

    async def advance(self) -> None: ...

    def abandon(self) -> None:
        """Nobody waits for it any more: it ends as soon as it can."""

    async def close(self) -> None: ...


R = TypeVar("R", bound=StagedRollout)


class Dispatcher(Protocol):
    """Decides which stage of which rollout runs now."""

    @property
    def prewarms(self) -> bool:
        """Whether it opens the runtimes of rollouts whose run may not start yet."""

    def stream(self, rollouts: AsyncIterable[R]) -> AbstractAsyncContextManager[AsyncIterator[R]]:
        """The rollouts that have ended, as they end. Leaving the block early cancels and closes what is still under way."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a command wrote to one stream: its beginning and its end, where it is longer than was asked for."""

    head: bytes
    tail: bytes
    size: int
    """All that was written, kept or not."""

    @property
    def whole(self) -> bool:
        return self.size == len(self.head) + len(self.tail)


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a command in a sandbox."""

    code: int
    """Its exit code; 128 + n when signal n ended it, 127 when there is no such program."""
    stdout: Output
    stderr: Output
    timed_out: bool
    seconds: float


class Sandbox(Protocol):
    """A place apart in which an agent's commands run. Paths are absolute, and are resolved inside."""

    @property
    def folder(self) -> str:
        """Its own working folder."""

    async def run(
        self,
        command: Sequence[str],
        *,
        folder: str | None = None,
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        seconds: float = 60.0,
        keep: int = 65_536,
    ) -> Ran:
        """Run a program, without a shell, in `folder` (its own working folder when not given). All that it started
        is killed when `seconds` have passed. Of each output stream `keep` bytes are kept, half from its beginning and half
        from its end."""

    async def read(self, path: str, limit: int = 16_777_216) -> bytes:
        """The bytes of a regular file. Larger than `limit`, or no regular file: a `ToolError`."""

    async def write(self, path: str, data: bytes) -> None:
        """Write a file whole, making the folders above it."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state that sandboxes start from, by the name that its provider knows. The first is empty."""

    key: str = ""


@dataclass(frozen=True)
class Spec:
    """What decides a snapshot: equal specs are built once, and found again by later runs."""

    folders: Mapping[str, Path] = field(default_factory=dict)
    """Where inside, relative to the working folder or absolute, and which folder of this machine. It is copied as it is now,
    and belongs to the agent."""
    commands: Sequence[Sequence[str]] = ()
    """Run in turn; each must end with 0."""
    name: str = ""
    """Whatever else decides: a version, or what a set-up function does."""
    network: bool = False
    """Whether the set-up has the host's network."""
    seconds: float = 600.0
    """Time for each command."""
    base: Snapshot = Snapshot()
    """What it is built upon: another snapshot or, for containers, an image. Empty: the provider's own beginning."""


class Sandboxes(Protocol):
    """A provider of sandboxes. What one of them does is seen by no other."""

    async def snapshot(self, spec: Spec, setup: Callable[[Sandbox], Awaitable[object]] | None = None) -> Snapshot:
        """The state after the spec's commands, then `setup`."""

    def open(self, snapshot: Snapshot = ...) -> AbstractAsyncContextManager[Sandbox]:
        """A sandbox that starts from it. Leaving the block ends all that runs in it, and forgets all that was written."""

    async def close(self) -> None: ...
