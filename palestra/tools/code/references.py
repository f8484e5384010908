"""Where a name stands in a file's code, what it does there, and in which class or function."""

import re
from collections.abc import Iterator, Sequence

from palestra.tools.code import grammar, python
from palestra.tools.code.languages import PYTHON, Language, language_of
from palestra.tools.code.reading import decode
from palestra.tools.code.symbols import Definition, Import, Reference, Use


def find(path: str, data: bytes, name: str, definitions: Sequence[Definition], imports: Sequence[Import]) -> list[Reference]:
    """The references in one file, at most one for each line."""
    language = language_of(path)
    text = decode(data, language)
    lines = text.split("\n")
    found: list[Reference] = []
    for line, called in _places(language, text, name):
        if found and found[-1].line == line:
            continue
        scope = _scope(line, definitions)
        use = _use(line, name, called, scope, lines, definitions, imports)
        found.append(Reference(path, line, lines[line - 1].strip(), use, scope.name if scope else ""))
    return found


def _places(language: Language | None, text: str, name: str) -> Iterator[tuple[int, bool]]:
    """Each line where the name stands in code, and whether it is called there."""
    pattern = re.compile(rf"\b{re.escape(name)}\b(\s*\()?")
    if language is PYTHON or language is None:
        code, tree = python.blank(text), None
    else:
        code, tree = text, grammar.parse(language, text)
    line, counted = 1, 0
    for match in pattern.finditer(code):
        if tree is not None:
            start = len(code[: match.start()].encode())
            if not grammar.in_code(tree, start, start + len(name.encode())):
                continue
        line, counted = line + code.count("\n", counted, match.start()), match.start()
        yield line, match[1] is not None


def _scope(line: int, definitions: Sequence[Definition]) -> Definition | None:
    around = [each for each in definitions if each.kind != "variable" and each.start <= line <= each.end]
    return min(around, key=lambda each: each.end - each.start) if around else None


def _use(
    line: int,
    name: str,
    called: bool,
    scope: Definition | None,
    lines: Sequence[str],
    definitions: Sequence[Definition],
    imports: Sequence[Import],
) -> Use:
    if any(each.start == line and each.name.rpartition(".")[2] == name for each in definitions):
        return "definition"
    if any(each.start <= line <= each.end for each in imports):
        return "import"
    if scope is not None and scope.kind == "class" and _names_base(name, lines[scope.start - 1 : line]):
        return "base"
    return "call" if called else "use"


def _names_base(name: str, header: Sequence[str]) -> bool:
    """Whether the name stands in the header of a class, of which these are the lines up to it."""
    text = "\n".join(header[:20])
    place = re.search(rf"\b{re.escape(name)}\b", text)
    if place is None or len(header) > 20:
        return False
    before = text[: place.start()]
    opened = before.count("(") - before.count(")")
    return "{" not in before and (opened > 0 or re.search(r"\b(?:extends|implements)\b|:[^:]*$", before) is not None)
