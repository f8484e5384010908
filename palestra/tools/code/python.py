"""Python by its lexical structure: strings and comments are blanked, brackets counted, and indentation says where a definition
ends.

On files that parse, classes and functions are those of the standard `ast`, at a fraction of its cost. A file that does not parse
is read all the same: a bracket left open ends at the next definition, and where a string is left open nothing is blanked.
"""

import functools
import keyword
import re
import unicodedata
from collections.abc import Iterator

from palestra.tools.code.symbols import Definition, Import, Kind

_QUOTED = re.compile(
    r'"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""'
    r"|'''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'''"
    r'|"[^"\\\n]*(?:\\.[^"\\\n]*)*(?:"|$)'
    r"|'[^'\\\n]*(?:\\.[^'\\\n]*)*(?:'|$)"
    r"|#[^\n]*"
    r"|\\\n",
    re.DOTALL | re.MULTILINE,
)
# In blanked text: a string over several lines begins, the same ends, a backslash before the end of a line.
_OPENS, _CLOSES, _JOINS = "\1", "\2", "\3"

_GAP = rf"(?:[ \t]|{_JOINS}\n)"
_TARGETS = (
    r"(\w++(?![ \t]*+,)"
    r"|[(\[]\s*+\*?\w[\w\s,*()\[\]]*?[)\]](?=[ \t]*=)"
    r"|(?:\*?\w++[ \t]*+,|[(\[][ \t]*+\*?\w)[\w \t,*()\[\]]*)[ \t]*+"
)
# Every pattern begins with a line break, which the engine finds much faster than the beginning of a line.
_STATEMENT = re.compile(rf"\n(?=( *+)(?:(?:async{_GAP}+)?(def|class){_GAP}+(\w+)|{_TARGETS}(=(?!=)|:(?!=))))")
_CHAINED = re.compile(rf"{_GAP}*{_TARGETS}=(?!=)")
_PLAIN_LINE = re.compile(rf"[^\n(\[{{{_OPENS}{_JOINS}]*+(?=\n)")
_NAME = re.compile(r"\w+")
_SUBSCRIPT = re.compile(r"\w+\s*[\[(][^\])]*[\])]")
_SURELY_NEW = re.compile(r"\n[ \t]*(?:(?:async[ \t]+)?(?:def|class)[ \t]|@\w|import[ \t]|from[ \t]+[.\w]+[ \t]+import)")
"""Lines that begin a statement even where a bracket before them was never closed."""

_IMPORT = re.compile(
    rf"\n *+(?:from[ \t]+([.\w]+(?:[ \t]*\.[ \t]*\w+)*)[ \t]+import{_GAP}*(\([^)]*\)?|(?:{_JOINS}\n|[^\n;])*)"
    rf"|import[ \t]+((?:{_JOINS}\n|[^\n;])+))"
)


class _UnterminatedError(Exception):
    """A string without an end."""


def normalize(text: str) -> str:
    """Lines end as `ast` has them end, and are indented by spaces."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if "\f" in text:
        text = re.sub(r"^[ \t]*\f[ \t\f]*?", "", text, flags=re.MULTILINE)
    if "\t" in text:
        text = re.sub(r"^ *\t[ \t]*", lambda match: match[0].expandtabs(8), text, flags=re.MULTILINE)
    return text


def blank(text: str) -> str:
    """The text without what is in strings and comments, every line in its place."""
    try:
        return _QUOTED.sub(_blanked, text)
    except _UnterminatedError:
        return text


def _blanked(match: re.Match[str]) -> str:
    found: str = match[0]
    first = found[0]
    if first == "#":
        return ""
    if first == "\\":
        return f"{_JOINS}\n"
    if len(found) == 1 or found[-1] != first:
        raise _UnterminatedError
    if "\n" not in found:
        return '"'
    return _OPENS + "\n" * found.count("\n") + _CLOSES


def definitions(code: str) -> Iterator[Definition]:
    """The definitions in blanked text, in order: classes and functions at any depth, variables of modules and classes."""
    code = f"\n{code}"  # so that a line's number is that of the breaks up to its start
    scopes: list[tuple[int, str, Kind]] = []  # where it ends, its qualified name, its kind
    line = counted = depth = measured = after = 0
    while match := _STATEMENT.search(code, after):
        start = match.start()
        after = start + 1
        while scopes and scopes[-1][0] <= start:
            scopes.pop()
        _, around, kind = scopes[-1] if scopes else (0, "", None)
        word = match[2]
        if word is None:
            if kind is not None and kind != "class":
                continue
            depth += _balance(code, measured, start)
            measured = start
            if depth > 0 or code[start - 1] == _JOINS:
                continue
            names = _targets(code, match[4], match[5], match.end(5))
            end = _statement_end(code, start + 1) if names else start
            found: Kind = "variable"
        else:
            depth, measured = 0, start
            end = _block_end(code, match.end(3), len(match[1]))
            names = [_normal(match[3])]
            found = "class" if word == "class" else "method" if kind == "class" else "function"
        line, counted = line + code.count("\n", counted, start + 1), start + 1
        last = line + code[counted:end].rstrip(f" \n{_JOINS}").count("\n")
        for name in names:
            yield Definition(f"{around}.{name}" if around else name, found, line, last)
        if word is not None:
            scopes.append((end, f"{around}.{names[0]}" if around else names[0], found))
            body = match.end(3)
            if word == "def" and code.find(" def", body, end) < 0 and code.find(" class", body, end) < 0:
                after = end  # nothing in it is a symbol


def _normal(name: str) -> str:
    """Names as Python compares them."""
    return name if name.isascii() else unicodedata.normalize("NFKC", name)


def _balance(code: str, start: int, end: int) -> int:
    """How many more brackets and long strings open than close."""
    count = code.count
    opened = count("(", start, end) + count("[", start, end) + count("{", start, end) + count(_OPENS, start, end)
    return opened - count(")", start, end) - count("]", start, end) - count("}", start, end) - count(_CLOSES, start, end)


@functools.cache
def _dedent(indent: int) -> re.Pattern[str]:
    return re.compile(rf"\n {{0,{indent}}}+[^ \n{_CLOSES}]")


def _block_end(code: str, start: int, indent: int) -> int:
    """Where the block whose header begins with this indentation ends: at a line break, or at the end of the text."""
    pattern = _dedent(indent)
    depth, measured = 0, start
    while found := pattern.search(code, measured):
        end = found.start()
        if _SURELY_NEW.match(code, end):
            return end
        depth += _balance(code, measured, end)
        if depth <= 0 and code[end - 1] != _JOINS:
            return end
        measured = end + 1
    return len(code)


def _statement_end(code: str, start: int) -> int:
    if plain := _PLAIN_LINE.match(code, start):
        return plain.end()
    depth, measured = 0, start
    while (end := code.find("\n", measured)) >= 0:
        depth += _balance(code, measured, end)
        if (depth <= 0 and code[end - 1] != _JOINS) or _SURELY_NEW.match(code, end):
            return end
        measured = end + 1
    return len(code)


def _targets(code: str, targets: str, sign: str, end: int) -> list[str]:
    """The names that a statement assigns to. An annotation has one."""
    if sign == ":":
        return [_normal(targets)] if _is_name(targets) else []
    names: list[str] = []
    while True:
        if targets.isidentifier():
            names += [_normal(targets)] if _is_name(targets) else []
        elif _balance(targets, 0, len(targets)) == 0:
            names += [_normal(name) for name in _NAME.findall(_SUBSCRIPT.sub("", targets)) if _is_name(name)]
        else:
            return names
        chained = _CHAINED.match(code, end)
        if chained is None:
            return names
        targets, end = chained[1], chained.end()


def _is_name(word: str) -> bool:
    return word.isidentifier() and not keyword.iskeyword(word)


def imports(code: str) -> Iterator[Import]:
    """The import statements in blanked text."""
    code = f"\n{code}"
    line = counted = 0
    for match in _IMPORT.finditer(code):
        line, counted = line + code.count("\n", counted, match.start() + 1), match.start() + 1
        last = line + match[0].rstrip().count("\n") - 1
        module, names, modules = match.groups()
        if module is not None:
            yield Import(line, last, "".join(module.split()), tuple(_listed(names)))
            continue
        for name in _listed(modules):
            yield Import(line, last, name)


def _listed(names: str) -> Iterator[str]:
    for part in names.replace(_JOINS, " ").strip("() \n").split(","):
        words = part.split()
        if words:
            yield words[0]
