"""Opening the backend that a config names: policies and, for training, a trainer."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from palestra.config import Config, OpenAI, Scripted, Skyrl, Tinker, Verl
from palestra.errors import ConfigError
from palestra.policy import TokenPolicies
from palestra.protocols import Policies, Renderer, Trainer


@dataclass(frozen=True)
class Opened:
    policies: Policies
    renderer: Renderer | None
    """Not there where the server renders."""
    trainer: Trainer | None


@asynccontextmanager
async def open_backend(config: Config, training: bool) -> AsyncIterator[Opened]:
    # Each backend is imported here and not above, so that `import palestra` needs none of their packages.
    if isinstance(config.backend, Scripted):
        from palestra.backends.scripted import open_scripted

        async with open_scripted(config.backend, config.tasks.folder) as (player, played):
            yield Opened(TokenPolicies(player, played), played, None)
    elif isinstance(config.backend, Tinker):
        from palestra.backends.tinker.opening import open_tinker

        async with open_tinker(config, config.backend, training) as (remote, rendered, taught):
            yield Opened(TokenPolicies(remote, rendered), rendered, taught)
    elif isinstance(config.backend, Verl):
        raise ConfigError(
            "the backend 'verl' only trains; evaluate what it learned with backend.kind = \"torch\" and "
            'backend.adapter = RUN/adapter (after backend.train = "full": backend.model = RUN/adapter)'
        )
    elif isinstance(config.backend, Skyrl):
        raise ConfigError(
            "the backend 'skyrl' only trains; evaluate what it learned with backend.kind = \"torch\" and "
            "backend.adapter = RUN/adapter"
        )
    elif isinstance(config.backend, OpenAI):
        try:
            from palestra.backends.openai.opening import open_openai
        except ModuleNotFoundError as error:
            raise ConfigError(f'backend.kind = "openai" needs {error.name}: pip install palestra[openai]') from None

        async with open_openai(config, config.backend, training) as (policies, rendering):
            yield Opened(policies, rendering, None)
    else:
        from palestra.backends.torch.opening import open_torch

        async with open_torch(config, config.backend, training) as (sampler, renderer, trainer):
            yield Opened(TokenPolicies(sampler, renderer), renderer, trainer)
