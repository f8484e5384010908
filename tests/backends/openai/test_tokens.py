"""A server as a sampler: tokens must come back as they were sent, with logprobs of the distribution that was asked for."""

from typing import Any

import pytest
from http_server import Answer, Asked, Said, play, serving

from palestra.backends.openai.client import Client
from palestra.backends.openai.limits import Limits
from palestra.backends.openai.tokens import ServerSampler, check_server
from palestra.config import OpenAI
from palestra.errors import ConfigError, InfrastructureError
from palestra.protocols import Renderer, Sampling
from palestra.trajectory import Completion

SAMPLING = Sampling(0.5, 4, frozenset({9}))


def completion(
    prompt: Any = (1, 2), ids: Any = (5, 9), logprobs: Any = (-0.5, -0.25), finish: str = "stop", **top: float
) -> Said:
    drawn = None if logprobs is None else {"token_logprobs": list(logprobs), "top_logprobs": [top or {"a": -0.5}]}
    choice = {
        "finish_reason": finish,
        "logprobs": drawn,
        "prompt_token_ids": prompt and list(prompt),
        "token_ids": ids and list(ids),
    }
    return Said({"choices": [choice], "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}})


def section(url: str) -> OpenAI:
    return OpenAI(kind="openai", base_url=url, model="m", mode="tokens", tokenizer="folder")


async def sample(answer: Answer, times: int = 1) -> tuple[list[Completion], list[Asked]]:
    with serving(answer) as served:
        async with (
            Client(served.url, None, None, Limits(None, None), 5.0, 5.0) as client,
            ServerSampler(client, section(served.url)).session(7, 100) as session,
        ):
            return [await session.sample([1, 2], SAMPLING) for _ in range(times)], served.asked


async def test_tokens_and_logprobs_come_back() -> None:
    [first, _], asked = await sample(play(completion()), times=2)
    assert first == Completion([5, 9], [-0.5, -0.25], [0, 0], "stop", first.usage)
    assert first.usage["completion_tokens"] == 2
    body = asked[0].body
    assert asked[0].path == "/v1/completions"
    assert (body["prompt"], body["temperature"], body["max_tokens"]) == ([1, 2], 0.5, 4)
    assert (body["stop_token_ids"], body["ignore_eos"], body["return_token_ids"]) == ([9], True, True)
    assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1.0, 0, 0.0, 1.0)
    assert asked[0].body["seed"] != asked[1].body["seed"]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (completion(prompt=(1, 3)), "read other tokens than were sent"),
        (completion(prompt=None), "read other tokens than were sent, or does not say which"),
        (completion(ids=None), "0 tokens with 2 logprobs"),
        (completion(ids=()), "0 tokens"),
        (completion(logprobs=None), "2 tokens with 0 logprobs"),
        (completion(logprobs=(-1.0,)), "2 tokens with 1 logprobs"),
        (completion(logprobs=(-1.0, 3.0)), "not logarithms of probabilities"),
        (completion(logprobs=(-1.0, None)), "not logarithms of probabilities"),
        (completion(ids=(5,) * 5, logprobs=(-1.0,) * 5, finish="length"), "5 tokens where 4 were asked for"),
        (completion(finish="length"), "finish is 'length' behind token 9"),
        (completion(ids=(5, 6)), "finish is 'stop' behind token 6"),
    ],
)
async def test_what_is_not_exact_is_a_failure(said: Said, words: str) -> None:
    with pytest.raises(InfrastructureError, match=words):
        await sample(play(said))


async def check(answer: Answer, renderer: Renderer, temperature: float) -> None:
    with serving(answer) as served:
        async with Client(served.url, None, None, Limits(None, None), 5.0, 5.0) as client:
            await check_server(client, section(served.url), renderer, temperature)


def reading(renderer: Renderer, at_1: dict[str, float], elsewhere: dict[str, float]) -> Answer:
    """A server with the renderer's own tokenizer."""
    ids = {renderer.decode(tokens): tokens for tokens in [_probed(renderer)]}

    def answer(asked: Asked) -> Said:
        prompt = asked.body["prompt"]
        top = at_1 if asked.body["temperature"] == 1 else elsewhere
        return completion(ids.get(prompt) if isinstance(prompt, str) else prompt, (5,), (-0.5,), "length", **top)

    return answer


def _probed(renderer: Renderer) -> list[int]:
    from palestra.backends.openai.tokens import SAMPLE_TEXT
    from palestra.message import user

    return renderer.prompt([user(SAMPLE_TEXT)], [])


async def test_a_sound_server_is_taken(renderer: Renderer) -> None:
    at_1 = {"a": -0.1, "b": -3.0}
    await check(reading(renderer, at_1, {"a": -0.01, "b": -6.0}), renderer, 0.5)
    for temperature in (0.0, 1.0):  # no second question
        await check(reading(renderer, at_1, {}), renderer, temperature)


async def test_logprobs_of_another_temperature_are_refused(renderer: Renderer) -> None:
    top = {"a": -0.1, "b": -3.0}
    with pytest.raises(ConfigError, match=r"sampling\.temperature = 0\.5: .* start it with --logprobs-mode processed_logprobs"):
        await check(reading(renderer, top, top), renderer, 0.5)


async def test_another_tokenizer_and_no_ids_at_all_are_refused(renderer: Renderer) -> None:
    with pytest.raises(ConfigError, match="reads the same text as other tokens"):
        await check(play(completion((1, 2, 3))), renderer, 1.0)
    with pytest.raises(ConfigError, match="gives no token ids and logprobs back"):
        await check(play(completion(None)), renderer, 1.0)
