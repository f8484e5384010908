"""SkyRL's real HTTP client as our sampler, against a real server on this machine: exact tokens, and every way to go wrong."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from skyrl.backends.skyrl_train.inference_servers import remote_inference_client
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

from palestra import InfrastructureError, render
from palestra.backends.torch import model as models
from palestra.backends.torch.sampler import TorchSampler
from palestra.bridges.skyrl_train.cpu_engine import CpuEngine
from palestra.bridges.skyrl_train.sampler import EngineSampler
from palestra.message import user
from palestra.protocols import Sampling

Answer = Callable[[dict[str, Any], str], Awaitable[Any]]


class _Plain:
    """What the client wants a tokenizer for: text that nobody reads."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return ""

    def batch_decode(self, sequences: list[list[int]], **_: Any) -> list[str]:
        return ["" for _ in sequences]


@asynccontextmanager
async def _served(answer: Answer, seconds: float = 5.0) -> AsyncIterator[EngineSampler]:
    """A server that speaks the engines' protocol, and SkyRL's client to it."""

    async def handle(request: web.Request) -> web.StreamResponse:
        made = await answer(json.loads(await request.text()), request.headers.get("X-Session-ID", ""))
        return made if isinstance(made, web.StreamResponse) else web.json_response(made)

    app = web.Application()
    app.router.add_post("/inference/v1/generate", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    client = RemoteInferenceClient(url, [url], 1, model_name="tiny", tokenizer=_Plain())
    try:
        yield EngineSampler(client, model="tiny", vocabulary=100, seconds=seconds, capacity=None)
    finally:
        if client._session is not None:
            await client._session.close()
        await runner.cleanup()


def _choice(tokens: list[int], logprobs: list[Any], reason: str = "stop") -> dict[str, Any]:
    content = [{"logprob": logprob} for logprob in logprobs]
    return {"choices": [{"token_ids": tokens, "finish_reason": reason, "logprobs": {"content": content}}]}


async def _ask(sampler: EngineSampler, max_tokens: int = 4) -> Any:
    async with sampler.session(7, 100) as session:
        return await session.sample([1, 2, 3], Sampling(1.0, max_tokens, frozenset({9})))


async def test_tokens_come_through_the_wire_as_they_were_sampled(model: Path) -> None:
    """The same server process behind HTTP and without it."""
    renderer = render.load(model)
    prompt = renderer.prompt([user("Where is the red kite?")], [])
    loaded = models.load(model, torch.float32, torch.device("cpu"))
    inner = TorchSampler(loaded, 10_000)
    inner.start()
    engine = CpuEngine(inner, "tiny")
    vocabulary = int(loaded.config.vocab_size)

    async def answer(asked: dict[str, Any], session: str) -> Any:
        how = asked["sampling_params"]
        made = await engine.generate({"prompt_token_ids": [asked["token_ids"]], "session_ids": [session], "sampling_params": how})
        return _choice(made["response_ids"][0], made["response_logprobs"][0], made["stop_reasons"][0])

    direct = EngineSampler(CpuEngine(inner, "tiny"), model="tiny", vocabulary=vocabulary, seconds=30, capacity=None)
    sampling = Sampling(1.0, 12, renderer.stop_ids)
    try:
        async with _served(answer, 30) as remote, remote.session(5, 100) as far, direct.session(5, 100) as near:
            remote._vocabulary = vocabulary
            wired, plain = await far.sample(prompt, sampling), await near.sample(prompt, sampling)
    finally:
        inner.close()
    assert list(wired.tokens) == list(plain.tokens)
    assert list(wired.logprobs) == list(plain.logprobs)
    assert wired.finish == plain.finish


async def test_a_good_answer_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(asked: dict[str, Any], session: str) -> Any:
        assert asked["token_ids"] == [1, 2, 3]
        assert asked["sampling_params"]["stop_token_ids"] == [9]
        assert session.startswith("palestra-")
        return _choice([4, 9], [-0.5, -0.25])

    async with _served(answer) as sampler:
        sampler.resumed = 3
        sampler._engine.increment_weight_version()
        sampler._engine.increment_weight_version()
        completion = await _ask(sampler)
    assert (list(completion.tokens), list(completion.logprobs), completion.finish) == ([4, 9], [-0.5, -0.25], "stop")
    assert list(completion.versions) == [4, 4]


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (_choice([4, 9], [-0.5]), "2 tokens with 1 logprobs"),
        (_choice([], []), "without one list"),
        (_choice([4] * 9, [-0.5] * 9), "9 tokens with 9 logprobs; 1 to 4"),
        (_choice([4, 900], [-0.5, -0.5]), "not among the model's 100"),
        (_choice([4, 9], [-0.5, float("nan")]), "a logprob that is none"),
        (_choice([4], [-0.5], "abort"), "broke off after 1 tokens"),
        ({"error": "no"}, "SkyRL's engine failed: KeyError"),
        ([1, 2], "SkyRL's engine failed: TypeError"),
    ],
)
async def test_garbage_is_the_infrastructures_fault(answer: Any, complaint: str) -> None:
    async def give(asked: dict[str, Any], session: str) -> Any:
        return answer

    async with _served(give) as sampler:
        with pytest.raises(InfrastructureError, match=complaint):
            await _ask(sampler)


async def test_a_server_that_stalls() -> None:
    async def stall(asked: dict[str, Any], session: str) -> Any:
        await asyncio.sleep(3)

    async with _served(stall, seconds=0.3) as sampler:
        with pytest.raises(InfrastructureError, match=r"did not answer within backend.seconds = 0.3"):
            await _ask(sampler)


async def test_a_server_that_refuses_the_key() -> None:
    async def refuse(asked: dict[str, Any], session: str) -> Any:
        return web.json_response({"error": {"message": "who are you?"}}, status=401)

    async with _served(refuse) as sampler:
        with pytest.raises(InfrastructureError, match=r"SkyRL's engine failed: .*401"):
            await _ask(sampler)


async def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_inference_client, "_DATA_PLANE_RETRIES", 2)
    client = RemoteInferenceClient("http://127.0.0.1:9", ["http://127.0.0.1:9"], 1, model_name="tiny", tokenizer=_Plain())
    with pytest.raises(InfrastructureError, match=r"SkyRL's engine failed: .*Cannot connect"):
        await _ask(EngineSampler(client, model="tiny", vocabulary=100, seconds=20, capacity=None))
    assert client._session is not None
    await client._session.close()
