"""Which hints an agent gets, and when: the switch for ablations."""

from typing import Annotated, Literal, get_args

import pydantic
from pydantic import Field

from palestra.config.section import Section
from palestra.errors import nearest

RuleName = Literal["unreadable", "unknown", "repeat", "cycle", "edits", "ending", "empty", "reading", "no_edit", "no_change"]


class Hints(Section):
    rules: Literal["off", "on"] | tuple[RuleName, ...] = "off"
    """All, none, or those that are named."""
    share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Of the groups that get hints; which ones, the run's seed decides."""
    evaluation: bool = False
    """Also in evaluations."""

    @pydantic.field_validator("rules", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        known = get_args(RuleName)
        if isinstance(value, str):
            if value not in ("off", "on"):
                raise ValueError(f"{value!r} is neither 'on' nor 'off'; give a list for single rules")
            return value
        for name in value if isinstance(value, list | tuple) else [value]:
            if name not in known:
                raise ValueError(f"there is no rule {name!r}{nearest(str(name), known)}")
        return value
