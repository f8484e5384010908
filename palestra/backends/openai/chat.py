"""A model behind a chat API as a policy: messages and native tool calls in and out. The server renders and parses.

What it samples is not seen in tokens, so it can be evaluated and never trained on. Token ids, where a server gives them, are
recorded with mask False.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from palestra.backends.openai.client import Client, ContextFull
from palestra.backends.openai.usage import usage_of
from palestra.backends.openai.wire import Reply, outgoing, read_chat, request_seed
from palestra.config import OpenAI
from palestra.message import JSON, Message
from palestra.protocols import Capacity, Sampling
from palestra.tool import Schema, strict_schema
from palestra.trajectory import Segment, Turn


class ChatPolicy:
    def __init__(self, client: Client, section: OpenAI, sampling: Sampling, context: int, seed: int) -> None:
        self._client, self._section, self._sampling, self._context, self._seed = client, section, sampling, context, seed
        self._said: list[dict[str, JSON]] = []
        self._tools: list[Schema] = []
        self._turns = self._held = 0
        self.segments: list[Segment] = []

    async def begin(self, messages: Sequence[Message], tools: Sequence[Schema]) -> None:
        self._said = [outgoing(message) for message in messages]
        self._tools = [strict_schema(tool) for tool in tools] if self._section.strict else list(tools)
        self._held = 0
        self.segments.append(Segment())

    async def act(self) -> Turn | None:
        room = self._context - self._held
        if room < 1:
            return None
        try:
            answer = await self._client.post("/chat/completions", self._request(min(self._sampling.max_tokens, room)))
        except ContextFull:
            return None
        reply, usage = read_chat(answer.body), usage_of(answer.body, answer.tries, self._section.prices)
        self._turns += 1
        self._held = int(usage["prompt_tokens"] + usage["completion_tokens"])
        self._said.append(reply.raw)
        return Turn(reply.message, reply.finish, len(self.segments) - 1, self._record(reply), usage=usage)

    async def observe(self, messages: Sequence[Message]) -> None:
        self._said += [outgoing(message) for message in messages]

    def _request(self, max_tokens: int) -> dict[str, JSON]:
        body: dict[str, JSON] = {
            "model": self._section.model,
            "messages": self._said,
            "temperature": self._sampling.temperature,
            "seed": request_seed(self._seed, self._turns),
            self._section.limit_key: max_tokens,
        }
        if self._tools:
            body["tools"] = self._tools
        if self._section.token_ids:
            body["return_token_ids"] = True
        return {key: value for key, value in body.items() if key not in self._section.omit} | self._section.extra

    def _record(self, reply: Reply) -> tuple[int, int]:
        """Keep the ids as long as each prompt goes on from what was recorded. A template may change what was said before."""
        segment = self.segments[-1]
        if reply.prompt_ids is None or reply.ids is None or reply.prompt_ids[: len(segment)] != segment.tokens:
            return (0, 0)
        segment.read(reply.prompt_ids[len(segment) :])
        start = len(segment)
        segment.read(reply.ids)
        return start, len(segment)


class ChatPolicies:
    """A `ChatPolicy` for each rollout. Waiting for one's place is not the agent's time, so places are taken here."""

    capacity: Capacity | None = None

    def __init__(self, client: Client, section: OpenAI) -> None:
        self._client, self._section = client, section
        self._places = asyncio.Semaphore(section.concurrency)

    @asynccontextmanager
    async def open(self, seed: int, sampling: Sampling, context: int) -> AsyncIterator[ChatPolicy]:
        async with self._places:
            yield ChatPolicy(self._client, self._section, sampling, context, seed)
