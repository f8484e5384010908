"""From a file's bytes to what is known of it. Contents are only read, never run."""

import codecs
import re

from palestra.tools.code import python
from palestra.tools.code.languages import PYTHON, Language
from palestra.tools.code.symbols import Import, Record

# Everything that cannot be in a word becomes a space; bytes above 127 belong to words of other alphabets.
_WORDS = bytes(code if code > 127 or chr(code).isalnum() or code == ord("_") else ord(" ") for code in range(256))
_COOKIE = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
_BINARY = b"\0"


def decode(data: bytes, language: Language | None) -> str:
    """The text, with lines as an editor counts them. Bytes that are no text of the file's encoding are replaced."""
    encoding = "utf-8"
    if language is PYTHON:
        for line in data[:400].split(b"\n")[:2]:
            if cookie := _COOKIE.match(line):
                encoding = cookie[1].decode("ascii")
    try:
        text = codecs.decode(data, encoding, "replace")
    except (LookupError, ValueError):  # no such encoding, or one of bytes to bytes
        text = data.decode("utf-8", "replace")
    return python.normalize(str(text).removeprefix("\ufeff"))


def read_record(data: bytes, language: Language) -> Record:
    if _BINARY in data:
        return Record((), (), "")
    text = decode(data, language)
    words = f" {b' '.join(set(data.translate(_WORDS).split())).decode('utf-8', 'replace')} "
    if language is PYTHON:
        code = python.blank(text)
        return Record(tuple(python.definitions(code)), tuple(python.imports(code)), words)
    return Record(None, tuple(_imports(text, language)), words)


def _imports(text: str, language: Language) -> list[Import]:
    if language.imports is None:
        return []
    found = []
    line, counted = 1, 0
    for match in language.imports.finditer(text):
        line, counted = line + text.count("\n", counted, match.start()), match.start()
        found.append(Import(line, line + match[0].count("\n"), next(group for group in match.groups() if group)))
    return found
