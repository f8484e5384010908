"""What the section of every backend has: how a model is named, and which keys of the file the backend cannot honour."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import pydantic
from pydantic import PositiveFloat, PositiveInt

from palestra.config.section import Section


def _locate_model(name: str) -> str:
    folder = Path(name).expanduser()
    return str(folder.resolve()) if folder.is_dir() else name


Model = Annotated[str, pydantic.AfterValidator(_locate_model)]


@dataclass(frozen=True)
class Only:
    """A key of the config, anywhere in the file, of which a backend can honour these values only."""

    key: str
    values: tuple[object, ...]
    why: str
    """Completes "the backend …"."""


class BackendSection(Section):
    """What the section of every backend says of itself, beside its keys."""

    environment: ClassVar[str | None] = None
    """The environment of its own that it runs in, by its name in `environments.py`."""
    only: ClassVar[tuple[Only, ...]] = ()
    """What it cannot honour: a config with any other value is refused when it is loaded."""

    def limits(self) -> tuple[Only, ...]:
        """That, and what more its own keys rule out."""
        return self.only


class Lora(Section):
    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
