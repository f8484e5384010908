"""Tools that every agent of a run gets besides those of its task."""

import shlex
from typing import Annotated

import pydantic
from pydantic import PositiveFloat

from palestra.config.section import Section


def _refuse_unusable(server: str) -> str:
    try:
        words = shlex.split(server)
    except ValueError as error:
        raise ValueError(f"{server!r} is no command line: {error}") from None
    if not words:
        raise ValueError("give a command that starts a server, or its http address")
    return server


Server = Annotated[str, pydantic.AfterValidator(_refuse_unusable)]


class Tools(Section):
    mcp: tuple[Server, ...] = ()
    """MCP servers, each as the command that starts it or as its http address. Each rollout has a connection of its own."""
    seconds: PositiveFloat = 120.0
    """Time for one answer of an MCP server."""
