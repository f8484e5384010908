"""SkyRL's engine client as our `Sampler`: token ids in and out, with logprobs and the policy version. What an engine answers is
checked; whatever is wrong with it is the infrastructure's fault, and the rollout is tried again."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import aiohttp
from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInterface

from palestra.errors import InfrastructureError
from palestra.protocols import Capacity, Sampling
from palestra.rollout import seed_of
from palestra.trajectory import Completion, FinishReason


class EngineSampler:
    def __init__(
        self, engine: InferenceEngineInterface, *, model: str, vocabulary: int, seconds: float, capacity: Capacity | None
    ) -> None:
        self._engine, self._model, self._vocabulary, self._seconds = engine, model, vocabulary, seconds
        self._numbers = count()
        self.capacity = capacity
        self.resumed = 0
        """Steps that the weights had behind them when this process began; the engine counts its own weight syncs only."""

    @property
    def version(self) -> int:
        """The policy version that the engine has: the steps that its weights have behind them."""
        synced: int = self._engine.weight_version
        return self.resumed + max(0, synced - 1)

    @asynccontextmanager
    async def session(self, seed: int, expected_tokens: int) -> AsyncIterator["EngineSession"]:
        name = f"palestra-{next(self._numbers)}"
        try:
            yield EngineSession(self, name, seed)
        finally:
            await self._engine.finish_session(name)

    async def ask(self, session: str, seed: int, tokens: Sequence[int], sampling: Sampling) -> Completion:
        version = self.version  # that of the first token: an engine may get new weights while it writes
        request = {
            "prompt_token_ids": [list(tokens)],
            "session_ids": [session],
            "cache_salt": str(version),
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_tokens": sampling.max_tokens,
                "stop_token_ids": sorted(sampling.stop_ids),
                "ignore_eos": True,  # only our renderer knows where a reply ends
                "logprobs": 1,
                "seed": seed,
            },
        }
        try:
            async with asyncio.timeout(self._seconds):
                answer = await self._engine.generate(request, model=self._model)
        except TimeoutError:
            raise InfrastructureError(f"SkyRL's engine did not answer within backend.seconds = {self._seconds:g}") from None
        except (aiohttp.ClientError, OSError, LookupError, TypeError, ValueError) as error:
            raise InfrastructureError(f"SkyRL's engine failed: {type(error).__name__}: {error}") from None
        written, logprobs, finish = self._checked(answer, sampling)
        return Completion(written, logprobs, [version] * len(written), finish)

    def _checked(self, answer: Any, sampling: Sampling) -> tuple[list[int], list[float], FinishReason]:
        try:
            [written], [logprobs] = answer["response_ids"], answer["response_logprobs"]
            written, logprobs = [int(token) for token in written], [float(logprob) for logprob in logprobs]
        except (LookupError, TypeError, ValueError):
            raise InfrastructureError("SkyRL's engine answered without one list of tokens and one of their logprobs") from None
        if not written or len(written) != len(logprobs) or len(written) > sampling.max_tokens:
            raise InfrastructureError(
                f"SkyRL's engine answered {len(written)} tokens with {len(logprobs)} logprobs; "
                f"1 to {sampling.max_tokens} tokens were asked for, each with its logprob"
            )
        if any(not 0 <= token < self._vocabulary for token in written):
            raise InfrastructureError(f"SkyRL's engine answered a token that is not among the model's {self._vocabulary}")
        if any(math.isnan(logprob) or logprob > 1e-3 for logprob in logprobs):
            raise InfrastructureError("SkyRL's engine answered a logprob that is none")
        if written[-1] in sampling.stop_ids:
            return written, logprobs, "stop"
        if len(written) < sampling.max_tokens:
            raise InfrastructureError(f"SkyRL's engine broke off after {len(written)} tokens: {answer.get('stop_reasons')}")
        return written, logprobs, "length"


class EngineSession:
    """One rollout's line to the engine; its requests find the same replica, and what that has cached."""

    def __init__(self, sampler: EngineSampler, name: str, seed: int) -> None:
        self._sampler, self._name, self._seed = sampler, name, seed
        self._turn = count()

    async def sample(self, tokens: Sequence[int], sampling: Sampling) -> Completion:
        return await self._sampler.ask(self._name, seed_of(self._seed, next(self._turn)) % 2**31, tokens, sampling)
