"""Python's definitions where its lexical structure is tricky, against `ast`; and files that do not parse."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.code.test_exactness import truth

from palestra.tools.code import python
from palestra.tools.code.languages import PYTHON
from palestra.tools.code.reading import decode, read_record

TRICKY = {
    "a definition in a docstring": 'def real():\n    """\n    def fake():\n        pass\n    """\n    return 1\n',
    "brackets at the margin": "def f(\n    a,\n):\n    x = [\n1,\n]\n    return x\n\nclass A:\n    def g(self): pass\n",
    "a dedent without a definition": "class A:\n    def f(self): pass\nif True:\n    def g(): pass\n    x = 1\n",
    "a string over lines at the end": 'def f():\n    return """\na\n"""\n\ny = 1\n',
    "a backslash": "def f():\n    x = 1 + \\\n2\n    return x\n\\\n\nz = \\\n  3\n",
    "one line": "class A: pass\nclass B(A): x = 1\ndef f(): return lambda: 0\n",
    "decorators": "@a\n@b(\n  1,\n)\nasync  def f():\n    await g()\n\n\n    # trailing\n\nx = 2",
    "nested": "def f():\n    class A:\n        x = 1\n        def g(self):\n            def h(): pass\n    return A\n",
    "tabs": "class A:\n\tdef f(self):\n\t\tpass\n\tx = 1\n",
    "quotes in quotes": "a = 'it\\'s \"\"\" not'\ndef f():\n    return \"'''\"\nb = '''\"'''\n",
    "carriage returns": "class A:\r\n    x = 1\r\n    def f(self):\r\n        pass\r\n",
    "an old break": "x = 1\rdef f():\r    pass\r",
    "a form feed": "x = 1\n\f\nclass A:\n    pass\n\fdef f(): pass\n",
    "chained and unpacked": "a = b = 1\nc, (d, *e) = 1, (2, 3)\n(\n    f,\n    g,\n) = 1, 2\n[h, i] = 1, 2\nj: int\nk: int = 1\n",
    "no definitions": "x == 1\nf(a=1)\nx.y = 1\nx[0] = 1\nx += 1\nd = {\n  k: 1,\n}\nf(\n    q=1,\n)\n",
    "keywords": "try:\n    a = 1\nexcept E:\n    b = 2\nelse:\n    c = 3\nfinally:\n    d = 4\nfor i in x:\n    e = 5\n",
    "other alphabets": "class Größe:\n    ﬁeld = 1\n    def 长(self): pass\n",
    "a comment at the margin": "def f():\n    a = 1\n# comment\n    b = 2\n\nclass C:\n# comment\n    d = 1\n",
    "a prefix": "x = rb'\\''\ny = f'{1}' f\"{2}\"\ndef f(): pass\n",
    "types": "class A(Generic[T], metaclass=M):\n    x: dict[str,\n            int] = {}\n    def f(self) -> 'A': ...\n",
    "conditional": "if a:\n    def f(): pass\nelse:\n    def f(): pass\nwith b:\n    class C: pass\n",
}


@pytest.mark.parametrize("text", TRICKY.values(), ids=TRICKY)
def test_definitions_are_those_of_ast(text: str) -> None:
    true = {(each.name, each.kind, each.start, each.end) for each in truth("x.py", ast.parse(text))}
    found = {tuple(each) for each in read_record(text.encode(), PYTHON).definitions or ()}
    if "class B(A): x = 1" in text:
        true.discard(("B.x", "variable", 2, 2))  # what stands behind a colon is not looked at
    assert found == true


def test_names_are_those_of_the_files_encoding() -> None:
    data = "# -*- coding: latin-1 -*-\ndef größe(): pass\n".encode("latin-1")
    assert [each.name for each in read_record(data, PYTHON).definitions or ()] == ["größe"]


def names(text: str) -> list[str]:
    return [f"{each.name}:{each.start}" for each in python.definitions(python.blank(text)) if each.kind != "variable"]


BROKEN = {
    "a call left open": (
        "class A:\n    def f(self):\n        g(1,\n\n    def h(self):\n        pass\n\nclass B: pass\n",
        "A.h:5",
        "B:8",
    ),
    "a header left open": ("class A:\n    def f(self, x\n\n    def h(self): pass\n\nclass B: pass\n", "A.f:2", "A.h:4", "B:6"),
    "a docstring left open": ('def f():\n    """doc\n\ndef g():\n    """doc"""\n\ndef h(): pass\n', "f:1", "g:4", "h:7"),
    "a string left open": ('def f():\n    return "a\n\ndef g(): pass\n', "f:1", "g:4"),
    "a merge's markers": (
        "class A:\n<<<<<<< ours\n    def f(self): pass\n=======\n    def g(self): pass\n>>>>>>> b\nclass B: pass\n",
        "B:7",
    ),
    "a half-written class": ("class A\n    def f(self):\n        pass\nclass B:\n    def g(self): pass\n", "A:1", "B.g:5"),
    "too many brackets": ("x = 1))\ndef f():\n    y = (2\n\ndef g(): pass\n", "f:2", "g:5"),
}


@pytest.mark.parametrize(("text", "found"), [(text, found) for text, *found in BROKEN.values()], ids=BROKEN)
def test_what_does_not_parse_is_read_all_the_same(text: str, found: list[str]) -> None:
    with pytest.raises(SyntaxError):
        ast.parse(text)
    assert set(found) <= set(names(text))


def test_imports() -> None:
    text = (
        "import a, b.c as d\nfrom . import e\nfrom ..f.g import (\n    h as i,  # why\n    j,\n)\nif x:\n    from k import *\n"
        's = """\nimport no\n"""\nfrom l import m, \\\n    n\n'
    )
    assert [tuple(each) for each in python.imports(python.blank(text))] == [
        (1, 1, "a", ()),
        (1, 1, "b.c", ()),
        (2, 2, ".", ("e",)),
        (3, 6, "..f.g", ("h", "j")),
        (8, 8, "k", ("*",)),
        (12, 13, "l", ("m", "n")),
    ]


@given(st.text(alphabet="ab_ \t\n\r\f\\\"'()[]{}#:=,;@.é\0") | st.binary())
def test_any_bytes_are_read(content: str | bytes) -> None:
    data = content.encode() if isinstance(content, str) else content
    lines = decode(data, PYTHON).count("\n") + 1
    for each in read_record(data, PYTHON).definitions or ():
        assert 1 <= each.start <= each.end <= lines


@given(
    st.lists(
        st.sampled_from(
            ["def f(", "):", "class A:", "    x = 1", "'''", '"""', "(", ")", "    def g(self): pass", "@d", "\\", ""]
        )
    )
)
def test_what_parses_is_read_as_ast_reads_it(lines: list[str]) -> None:
    text = "\n".join(lines) + "\n"
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    true = [(each.name, each.kind, each.start, each.end) for each in truth("x.py", tree) if each.kind != "variable"]
    assert [tuple(each) for each in python.definitions(python.blank(text)) if each.kind != "variable"] == true
