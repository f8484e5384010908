"""Opening the embedded backend: two copies of the model, one that samples and one that learns."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from palestra import render
from palestra.backends.torch import lora, model
from palestra.backends.torch.sampler import TorchSampler
from palestra.backends.torch.trainer import TorchTrainer
from palestra.config import Config, Torch
from palestra.errors import ConfigError
from palestra.protocols import Renderer


@asynccontextmanager
async def open_torch(
    config: Config, section: Torch, training: bool
) -> AsyncIterator[tuple[TorchSampler, Renderer, TorchTrainer | None]]:
    model.keep_freed_memory()
    if section.threads:
        torch.set_num_threads(section.threads)
    if training and config.sampling.temperature == 0:
        raise ConfigError("sampling.temperature = 0: training needs a temperature above 0, or all attempts are the same")
    folder = model.locate(section.model)
    device, dtype = model.choose_device(section.device), getattr(torch, section.dtype)
    renderer = render.load(folder, section.renderer, section.thinking)
    sampler = TorchSampler(model.load(folder, dtype, device), section.kv_tokens)
    trainer = _trainer(config, section, folder, dtype, device, sampler) if training or section.adapter else None
    sampler.start()
    try:
        yield sampler, renderer, trainer
    finally:
        sampler.close()
        if trainer is not None:
            trainer.close()


def _trainer(
    config: Config, section: Torch, folder: Path, dtype: torch.dtype, device: torch.device, sampler: TorchSampler
) -> TorchTrainer:
    if section.adapter is not None and section.train == "full":
        raise ConfigError('backend.adapter goes with backend.train = "lora" only')
    learner: Any = model.load(folder, dtype, device)
    if section.train == "lora":
        lora.adapt(learner, section.lora.rank, section.lora.alpha, config.run.seed)
    trainer = TorchTrainer(
        learner,
        sampler,
        adapter=section.train == "lora",
        temperature=config.sampling.temperature or 1.0,
        max_grad_norm=config.training.max_grad_norm if config.training else 1.0,
        pack_tokens=section.pack_tokens,
        source=str(folder),
    )
    if section.adapter is not None:
        lora.load_adapter(learner, section.adapter)
        trainer.publish_now()
    if config.loss.kl:
        trainer.keep_reference()
    return trainer
