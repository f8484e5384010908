"""Where agents' commands run, and what they may use there: one section for each provider of sandboxes."""

from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from palestra.config.section import Located, Section


class _Limited(Section):
    """What all processes of one sandbox may use together."""

    memory_mb: PositiveInt = 1024
    """What is written counts here too, as it is kept in memory."""
    processes: PositiveInt = 256
    cpus: PositiveFloat = 1.0
    network: bool = False
    """Share the host's network, unfiltered."""
    warm: NonNegativeInt = 0
    """Sandboxes that are started ahead, from the snapshots that were asked for last."""


class BubblewrapSandbox(_Limited):
    """bubblewrap over overlayfs."""

    kind: Literal["bubblewrap"]
    disk_mb: PositiveInt = 512
    base: Located = Path("/")
    """The root folder whose system folders are shown, read-only."""
    cache: Located | None = None
    """Where snapshots are kept; in the user's cache folder when not given."""


class ContainerSandbox(_Limited):
    """A container of docker or podman, from any image."""

    kind: Literal["container"]
    image: str
    """It must be on this machine already, and have a shell and tar."""
    engine: tuple[str, ...] = ()
    """The program and its own options; podman, or docker, when not given."""
    options: tuple[str, ...] = ()
    """More options for its `run`."""


class LocalSandbox(Section):
    """A plain folder: no protection at all."""

    kind: Literal["local"]


AnySandbox = BubblewrapSandbox | ContainerSandbox | LocalSandbox

Sandbox = Annotated[
    AnySandbox,
    Field(discriminator="kind"),
    pydantic.BeforeValidator(lambda value: {"kind": "bubblewrap"} | value if isinstance(value, dict) else value),
]
