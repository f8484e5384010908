"""The file that `--json PATH` names: looked at before the work, written after it."""

import json
import os
from pathlib import Path

from palestra.errors import UsageError


def check(path: Path | None) -> None:
    """Before the work, not after it. A folder that is not there is made in the end."""
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"--json {path}: this is a folder; name a file in it")
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if (there != path and not there.is_dir()) or not os.access(there, os.W_OK):
        raise UsageError(f"--json {path}: {there} cannot be written")


def write(path: Path | None, value: object) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json {path}: {error.strerror}") from None
