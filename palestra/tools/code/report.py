"""Answers as text: the true count first, then the best hits, as many as the budget of characters has room for."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from palestra.tools.code.index import CodeIndex
from palestra.tools.code.symbols import Dependency, Kind, Line, Reference, Symbol, Use

SHOWN = 200
"""Characters of a line that are shown."""

_KINDS: tuple[Kind, ...] = ("class", "function", "method", "variable")
_USES: tuple[Use, ...] = ("definition", "base", "call", "import", "use")


def ranked(symbols: Iterable[Symbol], name: str) -> list[Symbol]:
    """Exact names first, then code before tests, classes before variables, and what is higher up in the tree."""
    return sorted(
        symbols,
        key=lambda each: (
            each.name != name,
            is_test(each.path),
            each.name.count("."),
            _KINDS.index(each.kind),
            each.path.count("/"),
            each.path,
            each.start,
        ),
    )


def is_test(path: str) -> bool:
    return any(part in ("test", "tests", "testing") or part.startswith("test_") for part in path.lower().split("/"))


def definitions(name: str, found: Sequence[Symbol], subclasses: Sequence[Symbol], index: CodeIndex, budget: int) -> str:
    """One definition with its code; of several, the first line of each."""
    head = f"{_count(len(found), 'definition')} of {name!r}"
    if len(found) > 1:
        return _within(budget, f"{head}:", [f"{_place(each)}\n    {_first_line(each, index)}" for each in found])
    [symbol] = found
    below = [""]
    if subclasses:
        title = f"{_count(len(subclasses), 'direct subclass', 'es')}:"
        below.append(_within(budget // 4, title, [_place(each) for each in subclasses]))
    code = index.lines(symbol.path, symbol.start, symbol.end)
    if symbol.kind == "class" and sum(map(len, code)) > budget // 2:
        members = [each for each in index.outline(symbol.path) if each.name.startswith(f"{symbol.name}.")]
        below.append(_within(budget // 2, f"{_count(len(members), 'definition')} in it:", _rows(members)))
    rest = "\n".join(below)
    width = len(str(symbol.end))
    numbered = [f"{number:>{width}} {line[:SHOWN]}" for number, line in enumerate(code, symbol.start)]
    return _within(budget - len(rest), f"{head}: {_place(symbol)}", numbered, "more lines of it") + rest


def absent(
    name: str,
    kind: str | None,
    path: str,
    files: int,
    elsewhere: Sequence[Symbol],
    close: Sequence[Symbol],
    mentions: Sequence[Line],
    budget: int,
) -> str:
    what = (
        f"No {kind or 'definition'} of {name!r}"
        + (f" in {path}" if path else "")
        + f" ({_count(files, 'source file')} searched)."
    )
    parts = [what]
    if elsewhere:
        parts.append(_within(budget // 4, "It is defined elsewhere, or as something else:", [_place(each) for each in elsewhere]))
    if close:
        parts.append(_within(budget // 4, "Closest names:", [_place(each) for each in close]))
    if mentions:
        parts.append(lines(f"mentioning {name.rpartition('.')[2]!r}", mentions, len(mentions), budget // 2))
    if len(parts) == 1:
        parts.append("No name resembles it, and no source file mentions it. Try search_text, or a shorter name.")
    return "\n".join(parts)


def references(name: str, found: Sequence[Reference], budget: int) -> str:
    counts = Counter(each.use for each in found)
    split = ", ".join(f"{counts[use]} {use}" for use in _USES if counts[use])
    best = sorted(found, key=lambda each: (_USES.index(each.use), is_test(each.path), each.path, each.line))
    shown = [f"{each.path}:{each.line} {each.use} in {each.scope or 'module'}: {each.text[:SHOWN]}" for each in best]
    return _within(budget, f"{_count(len(found), 'reference')} to {name!r} ({split}):", shown)


def outline(path: str, found: Sequence[Symbol], budget: int) -> str:
    if not found:
        return f"{path} defines no class, function or variable."
    return _within(budget, f"{path}: {_count(len(found), 'definition')}", _rows(found))


def lines(what: str, found: Sequence[Line], count: int, budget: int) -> str:
    if not count:
        return f"No line {what}. Try a shorter pattern, or search_symbol for a name."
    files = len({each.path for each in found})
    seen = f" in {_count(files, 'file')}" if len(found) == count else ""
    best = sorted(found, key=lambda each: (is_test(each.path), each.path, each.line))
    rows = [f"{each.path}:{each.line}: {each.text.strip()[:SHOWN]}" for each in best]
    return _within(budget, f"{_count(count, 'line')} {what}{seen}:", rows, more=count - len(rows))


def dependencies(path: str, outwards: Sequence[Dependency], inwards: Sequence[Dependency], budget: int) -> str:
    inner = [f"  line {each.line}: {each.module} -> {each.target}" for each in outwards if each.target]
    outer = sorted({each.module for each in outwards if not each.target})
    parts = [_within(budget // 2, f"{path} imports {_count(len(inner), 'time')} from this repository:", inner)]
    parts.append(f"and from elsewhere: {', '.join(outer)[: budget // 4] or 'nothing'}")
    by = [
        f"  {each.path}:{each.line}: {each.module}" for each in sorted(inwards, key=lambda each: (is_test(each.path), each.path))
    ]
    parts.append(_within(budget // 2, f"{_count(len({each.path for each in inwards}), 'file')} import it:", by))
    return "\n".join(parts)


def _rows(found: Iterable[Symbol]) -> list[str]:
    return [f"{'  ' * each.name.count('.')}{each.start}-{each.end} {each.kind} {each.name.rpartition('.')[2]}" for each in found]


def _within(budget: int, head: str, rows: Sequence[str], rest: str = "more", more: int = 0) -> str:
    """As many rows as fit, and how many do not."""
    kept = [head, *_fitting(rows, budget - len(head))]
    left = len(rows) - (len(kept) - 1) + more
    return "\n".join([*kept, f"… {left} {rest}"] if left else kept)


def _fitting(rows: Sequence[str], budget: int) -> Iterator[str]:
    for row in rows:
        budget -= len(row) + 1
        if budget < 0:
            return
        yield row


def _place(symbol: Symbol) -> str:
    return f"{symbol.path}:{symbol.start}-{symbol.end} {symbol.kind} {symbol.name}"


def _first_line(symbol: Symbol, index: CodeIndex) -> str:
    return "".join(index.lines(symbol.path, symbol.start, symbol.start)).strip()[:SHOWN]


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
