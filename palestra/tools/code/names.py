"""Names: when a partial one means a definition, and which known ones resemble an unknown one."""

import difflib
import re
import unicodedata
from collections.abc import Iterable

from palestra.errors import ToolError

LONGEST = 500


def normal(name: str) -> str:
    """A name as the index writes it: `a::b()` is `a.b`. A `ToolError` says what is wrong with what cannot be a name."""
    if len(name) > LONGEST:
        raise ToolError(f"the name has {len(name)} characters; give that of a class, function, method or variable")
    if "\0" in name:
        raise ToolError("the name holds a NUL byte; give that of a class, function, method or variable")
    bare = re.sub(r"\(.*\)$", "", name.strip()).replace("::", ".").replace("#", ".").strip(".")
    return bare if bare.isascii() else unicodedata.normalize("NFKC", bare)


def module_of(path: str) -> str:
    """A file's path as a dotted name, without its suffix."""
    stem = path[: path.rfind(".")].removesuffix("/__init__")
    return stem.replace("/", ".")


def matches(path: str, qualified: str, wanted: str) -> bool:
    """Whether `wanted` is the end of the qualified name, or of module and qualified name."""
    if f".{qualified}".endswith(f".{wanted}"):
        return True
    return wanted.endswith(f".{qualified}") and f".{module_of(path)}.{qualified}".endswith(f".{wanted}")


def closest(name: str, known: Iterable[str], count: int) -> list[str]:
    """The known names that share most with this one. Pieces of three letters choose those that are compared in full."""
    wanted = name.lower()
    pieces = {wanted[start : start + 3] for start in range(max(1, len(wanted) - 2))} if wanted else set()
    scored = []
    for each in known:
        lower = each.lower()
        shared = len([piece for piece in pieces if piece in lower])
        if shared:
            scored.append((-shared / (len(pieces) + abs(len(each) - len(name))), each))
    scored.sort()
    matcher = difflib.SequenceMatcher(b=wanted)
    ranked = []
    for _, each in scored[:100]:
        matcher.set_seq1(each.lower())
        ranked.append((-matcher.ratio(), each))
    return [each for ratio, each in sorted(ranked)[:count] if -ratio >= 0.5]


def nearest_paths(path: str, known: Iterable[str]) -> str:
    """A hint such as `; did you mean 'a/b.py' or 'c/b.py'?`."""
    name = path.rpartition("/")[2]
    same = sorted((each for each in known if each.rpartition("/")[2] == name), key=len)[:3]
    close = same or difflib.get_close_matches(path[:200], list(known)[:20_000], n=3, cutoff=0.7)
    return f"; did you mean {' or '.join(repr(each) for each in close)}?" if close else ""
