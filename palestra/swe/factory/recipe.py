"""A task set as a small file: for each task its package, the change that breaks it, and the tests that tell. No code is copied:
the releases are pinned by digest in the first line, and fetched when they are needed.
"""

import gzip
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from palestra.errors import TaskError
from palestra.message import JSON
from palestra.swe.factory.edit import Edit
from palestra.swe.factory.mutations import Kind
from palestra.swe.factory.packages import PACKAGES, find

FORMAT = 1


@dataclass(frozen=True)
class Recipe:
    id: str
    package: str
    kind: Kind
    edit: Edit
    """What breaks the package. Taking it back is the gold solution."""
    symbol: str
    lines: int
    """Of the function that is broken."""
    statement: str
    fails: tuple[str, ...]
    """Tests that fail because of it, and pass without."""
    passes: tuple[str, ...]
    """Tests that pass with it and without."""
    twists: tuple[Edit, ...]
    """Changes of hidden test files after which right code fails `canaries`; see twists.py."""
    canaries: tuple[str, ...]

    @property
    def graded(self) -> list[str]:
        """All tests that a grader runs, in its order."""
        return sorted({*self.fails, *self.passes, *self.canaries})

    @property
    def hidden(self) -> list[str]:
        """The test files that an agent does not get to see."""
        return sorted({test.partition("::")[0] for test in self.fails})


def write(path: Path, recipes: Sequence[Recipe], about: dict[str, JSON]) -> None:
    """The same recipes give the same bytes."""
    used = sorted({recipe.package for recipe in recipes})
    head = {"format": FORMAT, **about, "packages": {name: asdict(PACKAGES[name].source) for name in used}}
    lines = [json.dumps(head), *(json.dumps(asdict(recipe), ensure_ascii=False) for recipe in recipes)]
    data = io.BytesIO()
    with gzip.GzipFile(fileobj=data, mode="wb", mtime=0, filename="") as file:
        file.write("".join(f"{line}\n" for line in lines).encode())
    path.write_bytes(data.getvalue())


def read(path: Path) -> list[Recipe]:
    try:
        head, *rows = gzip.decompress(path.read_bytes()).decode().splitlines()
        about = json.loads(head)
        recipes = [_recipe(json.loads(row)) for row in rows]
    except (OSError, EOFError, ValueError, TypeError, KeyError) as error:
        raise TaskError(f"{path} is no set of the task factory: {error}") from None
    for name, source in about["packages"].items():
        if asdict(find(name).source) != source:
            raise TaskError(f"{path} was made of {source['archive']}, and the factory now has {find(name).source.archive}")
    return recipes


def _recipe(row: dict[str, JSON]) -> Recipe:
    plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    plain |= {"edit": Edit(**row["edit"]), "twists": tuple(Edit(**each) for each in row["twists"])}
    return Recipe(**plain)
