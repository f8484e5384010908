"""What every TOML file of Palestra has in common: sections without unknown keys, and one line that says what is wrong."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic

from palestra.errors import ConfigError, nearest

Located = Annotated[Path, pydantic.AfterValidator(lambda path: path.expanduser().resolve())]
"""A path that stays the same when the run goes on from another folder."""


class Section(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


S = TypeVar("S", bound=Section)


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file holds. That there is none is for the caller to explain."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; give the .toml file in it") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def validated(model: type[S], values: Mapping[str, Any], source: str) -> S:
    """The values as that section, or the first thing that is wrong with them."""
    try:
        return model.model_validate(values)
    except pydantic.ValidationError as error:
        raise ConfigError(f"{source}: {_complaint(model, error)}") from None


def _complaint(model: type[Section], error: pydantic.ValidationError) -> str:
    """In one line: which key, what is wrong, what would be right."""
    # A mistyped key is also a missing one; the typing error says more.
    problem = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    steps = [str(step) for step in problem["loc"]]
    tagged = len(steps) > 2 and steps[0] in ("backend", "dispatch")  # pydantic names the kind too, which the file does not
    where = ".".join([steps[0], *steps[2:]] if tagged else steps)
    match problem["type"]:
        case "extra_forbidden":
            return f"unknown key {where!r}{nearest(steps[-1], _keys(model, steps[:-1]))}"
        case "missing":
            return f"the key {where!r} is missing"
        case "value_error":
            return f"{where}: {problem['ctx']['error']}" if where else str(problem["ctx"]["error"])
        case "union_tag_not_found":
            return f"the key '{where}.kind' is missing; write kind = \"torch\""
        case "union_tag_invalid":
            return f"{where}.kind = {problem['ctx']['tag']!r} is unknown; known: {problem['ctx']['expected_tags']}"
        case _:
            return f"{where} = {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _keys(root: type[Section], section: Sequence[str]) -> list[str]:
    """The known keys of a section, looked up by its path; a step may be the kind of a section that has several."""
    models: list[Any] = [root]
    for step in section:
        kinds = [
            m for m in models if "kind" in m.model_fields and step in getattr(m.model_fields["kind"].annotation, "__args__", ())
        ]
        models = kinds or [model for m in models if step in m.model_fields for model in _models(m.model_fields[step].annotation)]
    return [key for model in models for key in model.model_fields]


def _models(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models(part)]
