"""Opening a server: its key, its model and its limits are checked before the first rollout."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from palestra import render
from palestra.backends.openai.chat import ChatPolicies
from palestra.backends.openai.client import Client, NotThere
from palestra.backends.openai.limits import Limits
from palestra.backends.openai.tokens import ServerSampler, check_server
from palestra.config import Config, OpenAI
from palestra.errors import ConfigError, InfrastructureError
from palestra.message import JSON
from palestra.policy import TokenPolicies
from palestra.protocols import Policies, Renderer

FIRST_PATIENCE = 10.0
"""Seconds in which a server must be there at the beginning; an address may be wrong."""


@asynccontextmanager
async def open_openai(config: Config, section: OpenAI, training: bool) -> AsyncIterator[tuple[Policies, Renderer | None]]:
    _refuse_what_cannot_be(config, section, training)
    key = _key(section.key_variable)
    limits = Limits(section.requests_per_minute, section.tokens_per_minute)
    async with Client(section.base_url, key, section.key_variable, limits, section.seconds, section.patience) as client:
        await _check_model(client, config, section)
        if section.mode == "chat":
            yield ChatPolicies(client, section), None
        else:
            renderer = render.load(Path(str(section.tokenizer)), section.renderer, section.thinking)
            await check_server(client, section, renderer, config.sampling.temperature)
            yield TokenPolicies(ServerSampler(client, section), renderer), renderer


def _refuse_what_cannot_be(config: Config, section: OpenAI, training: bool) -> None:
    if training:
        raise ConfigError(
            'backend.kind = "openai" samples and cannot train: evaluate with it (palestra eval), '
            'or train with a backend that has a trainer, such as kind = "torch"'
        )
    if section.seconds + section.patience > config.agent.seconds:
        raise ConfigError(
            f"backend.seconds + backend.patience = {section.seconds + section.patience:g} is more than "
            f"agent.seconds = {config.agent.seconds:g}: a server that is down would count as the agent's own time; "
            "lower them, or raise agent.seconds"
        )


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(
            f"backend.key_variable: the environment variable {variable} is not set; export it with the server's key"
        )
    if not key.isascii() or not key.isprintable():
        raise ConfigError(f"the environment variable {variable} holds what cannot be a key: a key is printable ASCII on one line")
    return key


async def _check_model(client: Client, config: Config, section: OpenAI) -> None:
    try:
        listed = (await client.get("/models", FIRST_PATIENCE)).body.get("data")
    except (InfrastructureError, NotThere):
        return  # not every server has a list
    length = _context_of(listed, section.model)
    if length is not None and config.agent.context > length:
        raise ConfigError(f"agent.context = {config.agent.context} is more than the {length} tokens that {client.base_url} takes")


def _context_of(listed: JSON, model: str) -> int | None:
    """The longest context of a model, where the server's list says it, as vLLM's does."""
    found = [row for row in listed if isinstance(row, dict) and row.get("id") == model] if isinstance(listed, list) else []
    length = found[0].get("max_model_len") if found else None
    return length if isinstance(length, int) else None
