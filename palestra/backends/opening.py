"""Opening the backend that a config names: a sampler, its renderer and, for training, a trainer."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from palestra.config import Config, Scripted, Tinker, Verl
from palestra.errors import ConfigError
from palestra.protocols import Renderer, Sampler, Trainer


@dataclass(frozen=True)
class Opened:
    sampler: Sampler
    renderer: Renderer
    trainer: Trainer | None


@asynccontextmanager
async def open_backend(config: Config, training: bool) -> AsyncIterator[Opened]:
    # Each backend is imported here and not above, so that `import palestra` needs none of their packages.
    if isinstance(config.backend, Scripted):
        from palestra.backends.scripted import open_scripted

        async with open_scripted(config.backend, config.tasks.folder) as (player, played):
            yield Opened(player, played, None)
    elif isinstance(config.backend, Tinker):
        from palestra.backends.tinker.opening import open_tinker

        async with open_tinker(config, config.backend, training) as (remote, rendered, taught):
            yield Opened(remote, rendered, taught)
    elif isinstance(config.backend, Verl):
        raise ConfigError(
            "the backend 'verl' only trains; evaluate what it learned with backend.kind = \"torch\" and "
            "backend.model = RUN/checkpoints/global_step_N/actor/huggingface"
        )
    else:
        from palestra.backends.torch.opening import open_torch

        async with open_torch(config, config.backend, training) as (sampler, renderer, trainer):
            yield Opened(sampler, renderer, trainer)
