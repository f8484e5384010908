"""What an agent is told: the behaviour that fails, as its reporter would see it. It is written from a failing test and what that
said; the change that made it fail is never looked at.
"""

import ast
import re
from collections.abc import Sequence

from palestra.swe.factory.edit import Text
from palestra.swe.factory.trials import Told

NAMED = 4
LINES = 12


def statement(release: str, test: str, told: Told, data: bytes, others: Sequence[str]) -> str:
    """About one failing test, whose file is `data`, and the names of the others."""
    said = "\n".join(line.rstrip() for line in told.message.strip().splitlines()[:LINES])
    parts = [f"{release}: {behaviour(test)} does not work as it should."]
    snippet = shown(data, told.line)
    if snippet:
        parts.append(f"This fails:\n\n```python\n{snippet}\n```")
    parts.append(f"{'with' if snippet else 'It fails with'}\n\n```\n{said}\n```")
    names = sorted({behaviour(other) for other in others} - {behaviour(test)})
    if names:
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        parts.append(f"Also affected: {', '.join(names[:NAMED])}{more}.")
    return "\n\n".join(parts)


def behaviour(test: str) -> str:
    """A test's name in words: `tests/test_x.py::TestCut::test_at_end[3]` is about `cut: at end`."""
    words = [re.sub(r"(?<=[a-z])(?=[A-Z])", " ", step) for step in test.partition("[")[0].split("::")[1:]]
    plain = [re.sub(r"(?i)\btests?\b|\btest(?=[ _])", "", word.replace("_", " ")).strip().lower() for word in words]
    return ": ".join(re.sub(r" +", " ", word) for word in plain if word) or "something"


def shown(data: bytes, line: int | None) -> str:
    """The statement at a line of a test."""
    span = shown_lines(data, line)
    if span is None:
        return ""
    text = Text(data)
    lines = [text.line(number) for number in range(span[0], span[1] + 1)]
    indent = min(len(each) - len(each.lstrip()) for each in lines if each.strip())
    return "\n".join(each[indent:] for each in lines)


def shown_lines(data: bytes, line: int | None) -> tuple[int, int] | None:
    """From where to where that statement goes, when it is short."""
    spans = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(ast.parse(data))
        if isinstance(node, ast.stmt) and line is not None and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    smallest = min(spans, key=lambda span: span[1] - span[0], default=None)
    return smallest if smallest is not None and smallest[1] - smallest[0] < LINES else None
