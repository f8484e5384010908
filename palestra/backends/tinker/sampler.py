"""Sampling over the Tinker API. The server batches; here every call is simply on its way at once."""

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import tinker
from tinker import types

from palestra.backends.tinker.calls import Line
from palestra.errors import InfrastructureError
from palestra.protocols import Capacity, Sampling
from palestra.trajectory import Completion


class TinkerSampler:
    def __init__(self, line: Line) -> None:
        self._line = line
        self._client: tinker.SamplingClient | None = None
        self._version = 0

    def replace_client(self, client: tinker.SamplingClient, version: int) -> None:
        self._client, self._version = client, version

    @property
    def capacity(self) -> Capacity | None:
        return None  # the server keeps its cache to itself

    @asynccontextmanager
    async def session(self, seed: int, expected_tokens: int) -> AsyncIterator["TinkerSession"]:
        yield TinkerSession(self, seed)

    async def draw(self, tokens: Sequence[int], sampling: Sampling, seed: int) -> Completion:
        assert self._client is not None, "the backend was opened with weights to sample from"
        client, version = self._client, self._version
        parameters = types.SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            stop=sorted(sampling.stop_ids),
            seed=seed,
        )
        async with self._line.calling("sample"):
            answer = await client.sample_async(types.ModelInput.from_ints(list(tokens)), 1, parameters)
            [sequence] = answer.sequences
            written, logprobs = list(sequence.tokens), list(sequence.logprobs or ())
        if len(logprobs) != len(written) or not 0 < len(written) <= sampling.max_tokens:
            raise InfrastructureError(
                f"the Tinker server at {self._line.address} sampled {len(written)} tokens with {len(logprobs)} logprobs, "
                f"where at most {sampling.max_tokens} were asked for"
            )
        stopped = written[-1] in sampling.stop_ids
        return Completion(written, logprobs, [version] * len(written), "stop" if stopped else "length")


class TinkerSession:
    def __init__(self, sampler: TinkerSampler, seed: int) -> None:
        self._sampler, self._seed, self._calls = sampler, seed, 0

    async def sample(self, tokens: Sequence[int], sampling: Sampling) -> Completion:
        self._calls += 1
        digest = hashlib.sha256(f"{self._seed}/{self._calls}".encode()).digest()
        return await self._sampler.draw(tokens, sampling, int.from_bytes(digest[:4], "big") >> 1)
