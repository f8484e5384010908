"""Opening the Tinker backend: a session with the server, weights to sample from and, for training, an adapter of one's own."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import tinker

from palestra import render
from palestra.backends.tinker.calls import Line, in_background
from palestra.backends.tinker.sampler import TinkerSampler
from palestra.backends.tinker.trainer import TinkerTrainer
from palestra.backends.torch.model import locate
from palestra.config import Config, Tinker
from palestra.errors import ConfigError, ModelError, nearest
from palestra.protocols import Renderer

KEY = "TINKER_API_KEY"
_LOCAL_KEY = "tml-local"  # the SDK wants one, and a server of one's own does not look at it


@asynccontextmanager
async def open_tinker(
    config: Config, section: Tinker, training: bool
) -> AsyncIterator[tuple[TinkerSampler, Renderer, TinkerTrainer | None]]:
    if training and config.sampling.temperature == 0:
        raise ConfigError("sampling.temperature = 0: training needs a temperature above 0, or all attempts are the same")
    key = os.environ.get(KEY) or (_LOCAL_KEY if section.base_url else "")
    if not key.startswith(("tml-", "eyJ")):
        raise ConfigError(f"the Tinker service needs a key that begins with tml-: set {KEY}")
    renderer = render.load(locate(section.tokenizer or section.model), section.renderer, section.thinking)
    address = section.base_url or os.environ.get("TINKER_BASE_URL", "")
    line = Line(address or "its default address", section.seconds)
    if address:
        await line.probe(key)
    sampler = TinkerSampler(line)
    service = tinker.ServiceClient(api_key=key, **({"base_url": address} if address else {}))
    async with line.calling("say which models it has"):
        offered = await in_background(service.get_server_capabilities)
        names = [model.model_name for model in offered.supported_models]
    if section.model not in names:  # SkyRL's server would take any name, and use the model that it has
        raise ModelError(f"the Tinker server at {line.address} has no model {section.model!r}{nearest(section.model, names)}")
    if not training:
        async with line.calling(f"sample from {section.model}"):
            sampler.replace_client(await in_background(lambda: service.create_sampling_client(base_model=section.model)), 0)
        yield sampler, renderer, None
        return
    async with line.calling(f"train {section.model}"):
        client = await in_background(
            lambda: service.create_lora_training_client(section.model, rank=section.rank, seed=config.run.seed)
        )
    trainer = TinkerTrainer(
        service,
        client,
        sampler,
        line,
        server=section.server,
        unit_weights=config.training is None or config.training.segment_weight == "segment",
        max_grad_norm=config.training.max_grad_norm if config.training else 1.0,
        model=section.model,
    )
    try:
        await trainer.publish_as(0)
        yield sampler, renderer, trainer
    finally:
        if address:
            await line.unload(client.model_id, key)
