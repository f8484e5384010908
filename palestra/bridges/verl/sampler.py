"""verl's server client as our sampler. Each session keeps to one server, where its earlier turns are in the cache."""

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from uuid import uuid4

import ray
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from palestra.errors import InfrastructureError, first_line
from palestra.protocols import Capacity, Sampling
from palestra.rollout import seed_of
from palestra.trajectory import Completion, FinishReason


class VerlSampler:
    capacity: Capacity | None = None

    def __init__(self, client: LLMServerClient) -> None:
        self._client = client

    @asynccontextmanager
    async def session(self, seed: int, expected_tokens: int) -> AsyncIterator["VerlSession"]:
        yield VerlSession(self._client, seed)


class VerlSession:
    def __init__(self, client: LLMServerClient, seed: int) -> None:
        self._client, self._seed, self._name, self._calls = client, seed, uuid4().hex, 0

    async def sample(self, tokens: Sequence[int], sampling: Sampling) -> Completion:
        self._calls += 1
        parameters = {
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "max_tokens": sampling.max_tokens,
            "stop_token_ids": sorted(sampling.stop_ids),
            "logprobs": True,
            "seed": seed_of(self._seed, self._calls) >> 32,  # vLLM takes 32 bits
        }
        try:
            output = await self._client.generate(self._name, prompt_ids=list(tokens), sampling_params=parameters)
        except ray.exceptions.RayError as error:
            raised = getattr(error, "cause", None) or error  # what the server itself raised, where it lives
            raise InfrastructureError(f"verl's rollout server does not answer: {first_line(raised)}") from None
        except RuntimeError as error:  # the load balancer has no server left
            raise InfrastructureError(f"verl has no rollout server: {first_line(error)}") from None
        return completion(output, sampling)


def completion(output: TokenOutput, sampling: Sampling) -> Completion:
    """What the server wrote, checked: a wrong answer is the server's failure, and never the model's."""
    tokens, logprobs = output.token_ids, output.log_probs
    if output.stop_reason == "aborted":
        raise InfrastructureError("verl's rollout server aborted the request")
    if not tokens or len(tokens) > sampling.max_tokens:
        raise InfrastructureError(f"verl's rollout server wrote {len(tokens)} tokens, of 1 to {sampling.max_tokens}")
    if logprobs is None or len(logprobs) != len(tokens):
        raise InfrastructureError(f"verl's rollout server gave {len(logprobs or ())} logprobs for {len(tokens)} tokens")
    if not all(math.isfinite(logprob) and logprob <= 1e-3 for logprob in logprobs):
        raise InfrastructureError(
            f"verl's rollout server gave logprobs that are none: {[p for p in logprobs if not p <= 1e-3][:3]}"
        )
    version = output.extra_fields.get("global_steps")
    finish: FinishReason = "stop" if tokens[-1] in sampling.stop_ids else "length"
    return Completion(tokens, logprobs, [0 if version is None else version] * len(tokens), finish)
