"""What an agent did, in tokens and in words: completions, segments, turns, trajectories, groups, and training samples.

Tokens as sampled are the only truth. A segment is append-only: the list that is sent to the sampler is the list that is
trained on, and only what the sampler wrote has mask True.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from palestra.message import JSON, Message

Phase = Literal["train", "eval", "greedy"]
"""Training, evaluation as configured, and evaluation at temperature 0."""


@dataclass(frozen=True, slots=True)
class Key:
    """Which rollout of a run it is. It follows from the plan alone, so a run that resumes looks for the same keys again."""

    phase: Phase
    step: int
    """In training the round in which its task came up, and only under staleness 0 the step that trains on it."""
    task_id: str
    index: int

    @property
    def group(self) -> tuple[Phase, int, str]:
        """The same for all attempts at its task in this round."""
        return self.phase, self.step, self.task_id


FinishReason = Literal["stop", "length"]
"""Why a completion ended: the model wrote a stop token, or it was cut at the limit."""

Usage = Mapping[str, float]
"""What a server charges for: requests, retries, tokens, cost. Usages add up key by key."""

Stage = Literal["init", "run", "reward"]

Stop = Literal["finish", "answer", "turns", "context", "time", "stuck"]
"""Why a run ended: a tool finished it, a reply called no tool, one of its budgets was used up, or it went on repeating itself."""

FailureKind = Literal["infrastructure", "timeout", "bug", "abandoned"]
"""Infrastructure may be tried again, and so may an init that hangs; a bug in a task or tool would only repeat itself. A rollout
is abandoned when its step no longer waits for it."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What a sampler wrote: each token with its logprob under the sampled distribution and its policy version."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish: FinishReason
    usage: Usage = field(default_factory=dict)
    """Empty where nobody counts."""

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.logprobs) == len(self.versions):
            raise ValueError("a completion needs one logprob and one version for each token")


@dataclass(slots=True)
class Segment:
    """One append-only token sequence, and one training sequence."""

    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def read(self, tokens: Sequence[int]) -> None:
        """Append tokens that the model reads: prompts, tool results, closings of cut replies. They are never trained on."""
        self.tokens.extend(tokens)
        self.mask.extend([False] * len(tokens))
        self.logprobs.extend([0.0] * len(tokens))
        self.versions.extend([-1] * len(tokens))

    def wrote(self, completion: Completion) -> tuple[int, int]:
        """Append what the model wrote, and say where it stands."""
        start = len(self.tokens)
        self.tokens.extend(completion.tokens)
        self.mask.extend([True] * len(completion.tokens))
        self.logprobs.extend(completion.logprobs)
        self.versions.extend(completion.versions)
        return start, len(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class Turn:
    """One reply of the model and what the tools answered."""

    message: Message
    finish: FinishReason
    segment: int
    span: tuple[int, int]
    """Where the reply stands in its segment; empty for policies that see no tokens."""
    results: tuple[Message, ...] = ()
    usage: Usage = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hint:
    """What was said to the model behind a turn's results, by which rule of `hints/`."""

    turn: int
    rule: str
    text: str
    heeded: bool | None = None
    """Whether the next turns did what it said; None when there were none."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rollout did not come to its end. It leaves its group; it is never reward 0."""

    stage: Stage
    kind: FailureKind
    detail: str


class Span(NamedTuple):
    """What a rollout did from when to when, in seconds since 1970: a stage, or within the run a `sample` or a `tool`."""

    what: Literal["init", "run", "reward", "sample", "tool"]
    start: float
    end: float


_EPOCH = time.time() - time.monotonic()


def now() -> float:
    """Seconds since 1970 that never go backwards within a process."""
    return _EPOCH + time.monotonic()


@dataclass(slots=True)
class Trajectory:
    """One attempt at one task, filled in stage by stage."""

    task_id: str
    index: int
    openings: list[tuple[Message, ...]] = field(default_factory=list)
    """The messages that began each segment: the prompt, and what each `Rewrite` put in its place."""
    segments: list[Segment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    hints: list[Hint] | None = None
    """None: it was run without hints."""
    stop: Stop | None = None
    answer: JSON = None
    artifact: JSON = None
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    usage: dict[str, float] = field(default_factory=dict)
    """What all its turns were charged for, those of tries that failed included."""
    failure: Failure | None = None
    spans: list[Span] = field(default_factory=list)
    retried: list[Failure] = field(default_factory=list)
    """Failures after which it was tried again."""

    @property
    def seconds(self) -> dict[str, float]:
        """How long each stage took, retries included."""
        total: dict[str, float] = {}
        for what, start, end in self.spans:
            if what in ("init", "run", "reward"):
                total[what] = total.get(what, 0.0) + end - start
        return total

    @property
    def messages(self) -> list[Message]:
        """Everything said, in order."""
        said: list[Message] = []
        for number, opening in enumerate(self.openings):
            said.extend(opening)
            for turn in self.turns:
                if turn.segment == number:
                    said.extend((turn.message, *turn.results))
        return said

    def charge(self, usage: Usage) -> None:
        for name, amount in usage.items():
            self.usage[name] = self.usage.get(name, 0.0) + amount

    @property
    def sampled_tokens(self) -> int:
        return sum(sum(segment.mask) for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Group:
    """All attempts at one task under one training step: the unit of the advantage's baseline."""

    task_id: str
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One segment as a trainer takes it."""

    tokens: Sequence[int]
    mask: Sequence[bool]
    logprobs: Sequence[float]
    versions: Sequence[int]
    advantage: float
    weight: float = 1.0
    task_id: str = ""
