"""The scripted backend: plays given replies instead of a model's, token for token. For tests, and for users' own."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from palestra import render
from palestra.config import Scripted
from palestra.message import Message, assistant
from palestra.protocols import Capacity, Renderer, Sampling
from palestra.taskset import find_object
from palestra.trajectory import Completion

Reply = Message | str | Sequence[int]
"""A message as the model would write it, plain text, or the very tokens."""

Script = Callable[[str], Reply]
"""From everything said so far, as text with its markers, to the next reply."""


class ScriptedSampler:
    def __init__(self, script: Script, renderer: Renderer) -> None:
        self._script, self._renderer = script, renderer

    @property
    def capacity(self) -> Capacity | None:
        return None

    @asynccontextmanager
    async def session(self, seed: int, expected_tokens: int) -> AsyncIterator["ScriptedSession"]:
        yield ScriptedSession(self._script, self._renderer)


class ScriptedSession:
    def __init__(self, script: Script, renderer: Renderer) -> None:
        self._script, self._renderer = script, renderer

    async def sample(self, tokens: Sequence[int], sampling: Sampling) -> Completion:
        written = self._tokens(self._script(self._renderer.decode(tokens)))[: sampling.max_tokens]
        stopped = bool(written) and written[-1] in sampling.stop_ids
        return Completion(written, [0.0] * len(written), [0] * len(written), "stop" if stopped else "length")

    def _tokens(self, reply: Reply) -> list[int]:
        if isinstance(reply, str):
            reply = assistant(reply)
        return self._renderer.reply(reply) if isinstance(reply, Message) else list(reply)


@asynccontextmanager
async def open_scripted(section: Scripted, folder: Path) -> AsyncIterator[tuple[ScriptedSampler, Renderer]]:
    renderer = render.load(Path(section.model), section.renderer, section.thinking)
    script: Script = find_object(section.script, folder, "backend.script")
    yield ScriptedSampler(script, renderer), renderer
