"""Lines of a file as a model reads them, with their numbers; and the lines that are nearest to ones that are not there."""

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

WIDTH = 400
"""Characters of a line that are shown."""

_WORD = re.compile(r"\w+")
_SHOWN = 24
_CANDIDATES = 32
_SAME = 200  # a line that stands more often in a file says little about the place


def numbered(lines: Sequence[str], first: int = 1) -> str:
    return "\n".join(f"{number:>6}\t{_cut(line)}" for number, line in enumerate(lines, first))


def nearest_lines(lines: Sequence[str], wanted: Sequence[str]) -> str | None:
    """The lines that are most like the wanted ones, numbered, with a little around them; None when nothing is like them."""
    start = _place(lines, wanted)
    if start is None:
        return None
    here = lines[start : start + len(wanted)]
    blank = [line.split() for line in here] == [line.split() for line in wanted]
    first, end = max(0, start - 2), min(len(lines), start + len(wanted) + 2, start + _SHOWN)
    shown = numbered(lines[first:end], first + 1)
    return f"These lines are nearest{', and differ only in white space' if blank else ''}:\n{shown}"


def _place(lines: Sequence[str], wanted: Sequence[str]) -> int | None:
    """Where the wanted lines would begin. Lines that are there but for white space vote; if none is, the most similar says."""
    places: dict[str, list[int]] = defaultdict(list)
    for number, line in enumerate(lines):
        places[line.strip()].append(number)
    votes: Counter[int] = Counter()
    for offset, line in enumerate(wanted):
        known = places.get(line.strip(), []) if line.strip() else []
        if len(known) <= _SAME:
            votes.update(max(0, number - offset) for number in known)
    if votes:
        return votes.most_common(1)[0][0]
    for offset, line in sorted(enumerate(wanted), key=lambda pair: -len(pair[1].strip()))[:3]:
        if (similar := _most_similar(lines, line)) is not None:
            return max(0, similar - offset)
    return None


def _most_similar(lines: Sequence[str], wanted: str) -> int | None:
    words = set(_WORD.findall(wanted[:WIDTH]))
    shared = ((len(words.intersection(_WORD.findall(line[:WIDTH]))), -number) for number, line in enumerate(lines))
    likely = [-number for count, number in sorted(shared, reverse=True)[:_CANDIDATES] if count]
    matcher = difflib.SequenceMatcher(b=wanted.strip()[:WIDTH], autojunk=False)
    best = 0.5
    found: int | None = None
    for number in likely:
        matcher.set_seq1(lines[number].strip()[:WIDTH])
        if (ratio := matcher.ratio()) > best:
            best, found = ratio, number
    return found


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[:WIDTH]}[… {len(line) - WIDTH:,} more characters]"
