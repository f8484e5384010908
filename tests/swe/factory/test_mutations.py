"""Changes of code: each parses, changes what it says, and stays inside functions."""

import ast
from collections import Counter

import pytest

from palestra.errors import TaskError
from palestra.swe.factory.edit import Edit, apply
from palestra.swe.factory.mutations import functions, mutations
from palestra.swe.factory.packages import is_test, python_files

CODE = '''
LIMIT = 10

def cut(text, size=3):
    """Cut 1 < 2."""
    if len(text) <= size and size:
        return text
    return text[0 : size - 1] + "…"

class Box:
    def fill(self, a, b):
        self.held = max(a, b)
        if a:
            self.log(a)
'''.encode()


def changed(kind: str) -> set[tuple[str, str, str]]:
    return {(each.symbol, each.edit.old, each.edit.new) for each in mutations("m.py", CODE) if each.kind == kind}


def test_every_kind_of_change() -> None:
    assert changed("compare") == {("cut", "<=", "<")}
    assert changed("boolean") == {("cut", "and", "or")}
    assert changed("arithmetic") == {("cut", "-", "+"), ("cut", "+", "-")}
    assert changed("constant") == {("cut", "0", "1"), ("cut", "1", "2"), ("cut", "1", "0")}
    assert changed("swap") == {("Box.fill", "a, b", "b, a")}
    assert changed("negate") == {("Box.fill", "a", "not (a)")}
    assert changed("branch") == {("cut", "return text", "pass"), ("Box.fill", "self.log(a)", "pass")}
    assert ("Box.fill", "self.held = max(a, b)", "pass") in changed("statement")
    assert {symbol for symbol, _, _ in changed("body")} == {"cut", "Box.fill"}
    assert not any("Cut 1 < 2" in each.edit.old for each in mutations("m.py", CODE))


def test_an_edit_knows_its_file() -> None:
    edit = Edit("m.py", CODE.index(b"<="), "<=", "<")
    assert apply([edit], {"m.py": CODE})["m.py"] == CODE.replace(b"<=", b"<", 1)
    with pytest.raises(TaskError, match="not the file of this edit"):
        apply([edit], {"m.py": b"\n" + CODE})


def test_edits_of_one_file_do_not_move_one_another() -> None:
    edits = [Edit("m.py", 0, "a", "aaaa"), Edit("m.py", 4, "b", ""), Edit("m.py", 8, "c", "cc")]
    assert apply(edits, {"m.py": b"a + b + c"}) == {"m.py": b"aaaa +  + cc"}


@pytest.mark.parametrize("package", ["toolz", "boltons"])
def test_all_changes_of_a_real_package_parse_and_change_only_their_function(package: str) -> None:
    kinds: Counter[str] = Counter()
    for path, data in python_files(package).items():
        if is_test(path):
            continue
        whole = {(function.symbol, ast.dump(function.node)) for function in functions(ast.parse(data))}
        for mutation in mutations(path, data)[::17]:
            after = ast.parse(apply([mutation.edit], {path: data})[path])
            now = {(function.symbol, ast.dump(function.node)) for function in functions(after)}
            differ = {symbol for symbol, _ in whole ^ now}
            assert mutation.symbol in differ
            assert all(mutation.symbol.startswith(f"{each}.") or each.startswith(mutation.symbol) for each in differ)
            kinds[mutation.kind] += 1
    assert len(kinds) >= 9
