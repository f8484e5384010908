"""The model as the agent sees it. `TokenPolicy` owns the segments: what it sends to the sampler is what is trained on."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from palestra.message import Message
from palestra.protocols import Capacity, Renderer, Sampler, Sampling, Session
from palestra.tool import Schema
from palestra.trajectory import FinishReason, Segment, Turn


class TokenPolicy:
    def __init__(self, session: Session, renderer: Renderer, sampling: Sampling, context: int) -> None:
        self._session, self._renderer, self._context = session, renderer, context
        self._sampling = replace(sampling, stop_ids=renderer.stop_ids)
        self._finish: FinishReason = "stop"
        self.segments: list[Segment] = []

    async def begin(self, messages: Sequence[Message], tools: Sequence[Schema]) -> None:
        segment = Segment()
        segment.read(self._renderer.prompt(messages, tools))
        self.segments.append(segment)

    async def act(self) -> Turn | None:
        segment = self.segments[-1]
        room = self._context - len(segment)
        if room < 1:
            return None
        sampling = replace(self._sampling, max_tokens=min(self._sampling.max_tokens, room))
        completion = await self._session.sample(segment.tokens, sampling)
        span = segment.wrote(completion)
        self._finish = completion.finish
        message = self._renderer.parse(completion.tokens)
        return Turn(message, completion.finish, len(self.segments) - 1, span, usage=completion.usage)

    async def observe(self, messages: Sequence[Message]) -> None:
        self.segments[-1].read(self._renderer.follow(self._finish, messages))


class TokenPolicies:
    """A `TokenPolicy` for each rollout, with a session of its own."""

    def __init__(self, sampler: Sampler, renderer: Renderer) -> None:
        self.sampler, self._renderer = sampler, renderer

    @property
    def capacity(self) -> Capacity | None:
        return self.sampler.capacity

    @asynccontextmanager
    async def open(self, seed: int, sampling: Sampling, context: int) -> AsyncIterator[TokenPolicy]:
        async with self.sampler.session(seed, context) as session:
            yield TokenPolicy(session, self._renderer, sampling, context)
