"""Definitions in languages with braces by their lines alone: for files that do not parse, where a parser loses what follows."""

import re
from collections.abc import Iterator

from palestra.tools.code.symbols import Definition, Kind

_MODIFIER = (
    r"(?:export|default|public|private|protected|internal|static|abstract|final|async|unsafe|inline|declare|pub(?:\([^)]*\))?)"
)
_DEFINED = re.compile(
    rf"^([ \t]*)(?:{_MODIFIER}[ \t]+)*+"
    r"(?:(?:class|interface|struct|enum|trait|union|record|type)[ \t]+(\w+)"
    r"|(?:function\*?|fn|func|macro_rules!)[ \t]+(?:\([^)\n]*\)[ \t]*)?(\w+)"
    r"|(?:[\w<>\[\],*&:]+[ \t]+)*+[*&]*([A-Za-z_]\w*)[ \t]*\([^;{}]*\)[^;{}()=]*\{)",
    re.MULTILINE,
)
_NO_NAME = frozenset(
    ("if", "for", "while", "switch", "catch", "else", "function", "do", "with", "match", "synchronized", "sizeof")
)


def definitions(text: str) -> Iterator[Definition]:
    lines = text.split("\n")
    scopes: list[tuple[int, str, Kind]] = []  # its indentation, its qualified name, its kind
    line = counted = 0
    for match in _DEFINED.finditer(text):
        indent, kept, function, plain = match.groups()
        name = kept or function or plain
        if name in _NO_NAME or (plain and re.match(r"[ \t]*(?:return|else|throw|new)\b", match[0])):
            continue
        line, counted = line + text.count("\n", counted, match.start()), match.start()
        width = len(indent.expandtabs(8))
        while scopes and scopes[-1][0] >= width:
            scopes.pop()
        _, around, outer = scopes[-1] if scopes else (0, "", None)
        kind: Kind = "class" if kept else "method" if outer == "class" else "function"
        qualified = f"{around}.{name}" if around else name
        scopes.append((width, qualified, kind))
        yield Definition(qualified, kind, line + 1, _end(lines, line, width) + 1)


def _end(lines: list[str], start: int, width: int) -> int:
    """The line that closes what begins here: the first one indented no further that begins with a brace."""
    for index in range(start + 1, len(lines)):
        stripped = lines[index].strip()
        if stripped and len(lines[index].expandtabs(8)) - len(lines[index].expandtabs(8).lstrip()) <= width:
            if stripped.startswith("}"):
                return index
            if not stripped.startswith(("{", ")", "]", "#", "//", "/*", "*")):
                return index - 1
    return len(lines) - 1
