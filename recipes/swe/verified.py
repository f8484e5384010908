"""SWE-bench as task sets. Which data, which runtime and where the mirrors are, tasks.arguments says; paths are relative to the
project's folder.
"""

from collections.abc import Sequence
from pathlib import Path

from palestra.errors import UsageError
from palestra.swe.bench import loading
from palestra.swe.bench.runtime import Image, Native, Runtime
from palestra.swe.bench.task import Issue

PROJECT = Path(__file__).parents[2]
DATA = "../shared/data/swebench/verified.jsonl.gz"


def issues(
    data: str = DATA,
    split: str = "test",
    only: str = "",
    runtime: str = "native",
    mirrors: str = "mirrors",
    search: bool = True,
) -> Sequence[Issue]:
    """The instances of the data (a file, a folder, or a name), or only those named. The native runtime needs mirrors."""
    inside = PROJECT / data
    found = loading.load(str(inside) if inside.exists() else data, split)
    names = {name for name in only.split(",") if name}
    if unknown := names - {each.id for each in found}:
        raise UsageError(f"tasks.arguments.only: no instance {sorted(unknown)[0]!r} in {data}")
    place = _runtime(runtime, mirrors)
    return [Issue(each.id, each, place, search) for each in found if each.id in names or not names]


def _runtime(name: str, mirrors: str) -> Runtime:
    if name == "image":
        return Image()
    if name != "native":
        raise UsageError(
            f"tasks.arguments.runtime = {name!r} is unknown; known: 'native', 'image' (with sandbox.kind = 'container')"
        )
    inside = PROJECT / mirrors
    return Native(str(inside) if inside.is_dir() else mirrors)
