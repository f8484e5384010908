"""An agent's diff, read without trusting it. What changes files that it may not change is left out; what is left must be plain
changes of plain files, or the whole diff is refused: links, modes, renames, binary data, one file under two names.
"""

import re
from collections.abc import Callable, Iterator

LARGEST = 2_000_000
"""Characters. What an agent writes by hand is far smaller."""

_PLAIN = re.compile(r"[A-Za-z0-9_.+@-]+(/[A-Za-z0-9_.+@-]+)*\Z")
_HEADER = re.compile(r"diff --git a/(?P<old>\S+) b/(?P<new>\S+)\Z")
_MODES = re.compile(r"(new|deleted) file mode 100(644|755)\Z")
_INDEX = re.compile(r"index [0-9a-f]+\.\.[0-9a-f]+( 100(644|755))?\Z")


class Refused(Exception):
    """The diff is not one that a grader may apply. The text says why."""


def admitted(diff: str, allowed: Callable[[str], bool]) -> tuple[str, int]:
    """The part of a diff that changes allowed files, and how many others it changes: an agent may leave notes and tests of its
    own, which count for nothing."""
    if len(diff) > LARGEST:
        raise Refused(f"the diff has {len(diff):,} characters, and {LARGEST:,} are the most")
    head, *parts = re.split(r"^(?=diff --git )", diff, flags=re.MULTILINE)
    if head.strip():
        raise Refused("the diff does not begin with the header of a file")
    kept = {path: part for part in parts if (path := _path(part)) is not None and allowed(path)}
    left_out = len(parts) - len(kept)
    if len({path.lower() for path in kept}) < len(kept) or sum(_path(part) in kept for part in parts) > len(kept):
        raise Refused("a file is changed twice, or under two spellings")
    for path, part in kept.items():
        for line in _header(part):
            _check(path, line)
    return "".join(kept.values()), left_out


def _path(part: str) -> str | None:
    """The file that a part names, where that is one plain name."""
    names = _HEADER.match(part.partition("\n")[0])
    if names is None or names["old"] != names["new"] or not _PLAIN.match(names["new"]):
        return None
    steps = names["new"].lower().split("/")
    return None if {".", "..", ".git"} & set(steps) else names["new"]


def _header(part: str) -> Iterator[str]:
    for line in part.split("\n")[1:]:
        if line.startswith("@@"):
            return
        if line:
            yield line


def _check(path: str, line: str) -> None:
    if line.startswith("--- "):
        plain = line[4:] in (f"a/{path}", "/dev/null")
    elif line.startswith("+++ "):
        plain = line[4:] in (f"b/{path}", "/dev/null")
    else:
        plain = bool(_MODES.match(line) or _INDEX.match(line))
    if not plain:
        raise Refused(f"{path}: {line[:120]!r} is no plain change of a plain file")
