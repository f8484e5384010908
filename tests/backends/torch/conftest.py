"""Tiny models with random weights: everything about the engine but what a model knows."""

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from palestra.backends.torch import lora, model
from palestra.backends.torch.sampler import TorchSampler
from palestra.backends.torch.trainer import TorchTrainer
from palestra.trajectory import Sample

VOCABULARY = 300


def _config(kind: str) -> Any:
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.3,  # far from uniform, so that a wrong key or position shows
        "tie_word_embeddings": kind == "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[kind](**sizes)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    from transformers import AutoModelForCausalLM

    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            torch.manual_seed(0)
            made[kind] = tmp_path_factory.mktemp(kind)
            AutoModelForCausalLM.from_config(_config(kind)).save_pretrained(made[kind])
        return made[kind]

    return make


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return model.load(folder, dtype, torch.device("cpu"))


@pytest.fixture
def engine(tiny: Callable[[str], Path]) -> Callable[..., Any]:
    """A running sampler and its trainer, in float32."""

    @asynccontextmanager
    async def start(
        kind: str = "llama",
        train: str = "lora",
        rank: int = 4,
        temperature: float = 1.0,
        kv_tokens: int = 100_000,
        dtype: torch.dtype = torch.float32,
    ) -> AsyncIterator[tuple[TorchSampler, TorchTrainer]]:
        sampler = TorchSampler(load(tiny(kind), dtype), kv_tokens=kv_tokens)
        learner = load(tiny(kind), dtype)
        if train == "lora":
            lora.adapt(learner, rank=rank, alpha=8, seed=0)
        trainer = TorchTrainer(
            learner,
            sampler,
            adapter=train == "lora",
            temperature=temperature,
            max_grad_norm=1e9,
            pack_tokens=256,
            source=str(tiny(kind)),
        )
        sampler.start()
        try:
            yield sampler, trainer
        finally:
            sampler.close()
            trainer.close()

    return start


def random_tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(3, VOCABULARY) for _ in range(count)]


def random_samples(seed: int, groups: int = 2, members: int = 3) -> list[Sample]:
    """Groups that share prompts, all of which share a beginning."""
    chance = random.Random(seed)
    samples = []
    beginning = random_tokens(chance, 24)
    for _ in range(groups):
        prompt = beginning + random_tokens(chance, 18)
        for _ in range(members):
            reply = random_tokens(chance, chance.randrange(4, 30))
            mask = [False] * len(prompt) + [chance.random() < 0.8 for _ in reply]
            mask[-1] = True
            tokens = prompt + reply
            logprobs = [chance.uniform(-6, -4) if m else 0.0 for m in mask]
            samples.append(Sample(tokens, mask, logprobs, [0] * len(tokens), chance.uniform(-1, 1), chance.choice([0.5, 1.0])))
    return samples
