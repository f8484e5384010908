"""The recorded trajectories through a real vLLM server: it reads the tokens that were recorded, and finds each of them as likely
as the embedded backend does. This backend does not train, so there are neither advantages nor losses."""

import asyncio
from pathlib import Path

import pytest
from parity.recorded import credited, recorded

from palestra import config
from palestra.backends.openai.client import Client
from palestra.backends.openai.limits import Limits
from palestra.backends.openai.tokens import _request
from palestra.backends.openai.wire import read_completion
from palestra.backends.torch.opening import open_torch
from palestra.config import Torch
from palestra.trajectory import Sample

RECIPE = Path(__file__).parents[3] / "recipes" / "bridges"


async def _served(url: str, tokens: list[int]) -> list[float]:
    async with Client(url, None, None, Limits(None, None), seconds=120.0, patience=60.0) as client:
        answer = await client.post("/completions", _request("bridges", tokens, 1.0, 1) | {"prompt_logprobs": 0})
    assert read_completion(answer.body).prompt_ids == tokens
    _, *found = answer.body["choices"][0]["prompt_logprobs"]
    return [0.0, *(place[str(token)]["logprob"] for place, token in zip(found, tokens[1:], strict=True))]


async def _embedded(model: Path, samples: list[Sample]) -> list[list[float]]:
    section = Torch(model=str(model), dtype="float32", threads=1)
    async with open_torch(config.load(RECIPE / "train.toml"), section, training=True) as (_, _, trainer):
        assert trainer is not None
        return await trainer.logprobs(samples, 1.0)


def test_tokens_and_logprobs(server: str, model: Path) -> None:
    samples = credited(recorded().groups)
    for sample, logprobs in zip(samples, asyncio.run(_embedded(model, samples)), strict=True):
        assert asyncio.run(_served(server, list(sample.tokens))) == pytest.approx(logprobs, abs=1e-3)
