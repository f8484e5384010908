"""A server as an ordinary sampler: token ids in, token ids and logprobs out, by way of its completions API. vLLM does that.

The server neither renders nor parses. It must say which ids it read, and they must be those that were sent.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from palestra.backends.openai.client import Client
from palestra.backends.openai.usage import usage_of
from palestra.backends.openai.wire import Written, read_completion, request_seed
from palestra.config import OpenAI
from palestra.errors import ConfigError, InfrastructureError
from palestra.message import JSON, user
from palestra.protocols import Capacity, Renderer, Sampling
from palestra.trajectory import Completion

WHOLE = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""The distribution as it is: a server may otherwise take other values from the model's folder."""

SAMPLE_TEXT = "Où est le café ? It is 12.5 × 30, isn't it?\n\n\tdef f(x): return {'a': [1, 2]}"
TOP, SAME = 5, 0.02


class ServerSampler:
    """Each session is a conversation; so many have a place at once. A server's policy has no versions: all tokens are of 0."""

    capacity: Capacity | None = None

    def __init__(self, client: Client, section: OpenAI) -> None:
        self._client, self._section = client, section
        self._places = asyncio.Semaphore(section.concurrency)

    @asynccontextmanager
    async def session(self, seed: int, expected_tokens: int) -> AsyncIterator["ServerSession"]:
        async with self._places:
            yield ServerSession(self._client, self._section, seed)


class ServerSession:
    def __init__(self, client: Client, section: OpenAI, seed: int) -> None:
        self._client, self._section, self._seed = client, section, seed
        self._drawn = 0

    async def sample(self, tokens: Sequence[int], sampling: Sampling) -> Completion:
        # The server's own idea of an end would leave replies open that the renderer takes for closed.
        stops = {"stop_token_ids": sorted(sampling.stop_ids), "ignore_eos": True}
        asked = _request(self._section.model, list(tokens), sampling.temperature, sampling.max_tokens)
        asked |= stops | {"seed": request_seed(self._seed, self._drawn)}
        answer = await self._client.post("/completions", asked)
        self._drawn += 1
        written = read_completion(answer.body)
        ids, logprobs = _checked(written, list(tokens), sampling)
        usage = usage_of(answer.body, answer.tries, self._section.prices)
        return Completion(ids, logprobs, [0] * len(ids), written.finish, usage)


def _request(model: str, prompt: str | list[int], temperature: float, max_tokens: int, top: int = 0) -> dict[str, JSON]:
    asked = {"model": model, "prompt": prompt, "temperature": temperature, "max_tokens": max_tokens}
    return {**asked, **WHOLE, "logprobs": top, "return_token_ids": True, "add_special_tokens": False}


def _checked(written: Written, sent: list[int], sampling: Sampling) -> tuple[list[int], list[float]]:
    ids, logprobs = written.ids, written.logprobs
    if written.prompt_ids != sent:
        raise InfrastructureError("the server read other tokens than were sent, or does not say which")
    if not ids or logprobs is None or len(ids) != len(logprobs):
        raise InfrastructureError(f"the server gave {len(ids or ())} tokens with {len(logprobs or ())} logprobs")
    if len(ids) > sampling.max_tokens:
        raise InfrastructureError(f"the server wrote {len(ids)} tokens where {sampling.max_tokens} were asked for")
    if (written.finish == "stop") != (ids[-1] in sampling.stop_ids):
        raise InfrastructureError(f"the server's finish is {written.finish!r} behind token {ids[-1]}")
    return ids, logprobs


async def check_server(client: Client, section: OpenAI, renderer: Renderer, temperature: float) -> None:
    """Refuse a server that does not read and write tokens as the folder's tokenizer does, or whose logprobs are of another
    temperature."""
    ids = renderer.prompt([user(SAMPLE_TEXT)], [])
    first = await _probe(client, section, renderer.decode(ids), 1.0)
    if first.prompt_ids is None or first.ids is None or first.logprobs is None:
        raise ConfigError(
            f'backend.mode = "tokens": {client.base_url} gives no token ids and logprobs back (vLLM does); use mode = "chat"'
        )
    if first.prompt_ids != ids:
        raise ConfigError(
            f"backend.tokenizer = {section.tokenizer!r}: {client.base_url} reads the same text as other tokens; "
            "give the folder of the model that it serves"
        )
    if temperature in (0.0, 1.0):
        return
    other = await _probe(client, section, ids, temperature)
    both = set(first.top) & set(other.top)
    if both and all(abs(first.top[token] - other.top[token]) < SAME for token in both):
        raise ConfigError(
            f"sampling.temperature = {temperature:g}: the logprobs of {client.base_url} are those of temperature 1; "
            "start it with --logprobs-mode processed_logprobs"
        )


async def _probe(client: Client, section: OpenAI, prompt: str | list[int], temperature: float) -> Written:
    return read_completion((await client.post("/completions", _request(section.model, prompt, temperature, 1, TOP))).body)
