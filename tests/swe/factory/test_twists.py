"""Tests turned round: another expected value that reads like the first, else one that nothing equals, else the opposite."""

import pytest

from palestra.swe.factory.edit import apply
from palestra.swe.factory.twists import reads_naturally, twist

TEST = "tests/test_a.py::test_it"


def turned(body: str) -> list[str]:
    """The line that changes, in each way to turn the test round."""
    data = f"def test_it(self):\n{body}\n".encode()
    edits = list(twist("tests/test_a.py", data, TEST))
    changed = [apply([edit], {"tests/test_a.py": data})["tests/test_a.py"].decode().splitlines() for edit in edits]
    before = data.decode().splitlines()
    return [next(line.strip() for line, old in zip(lines, before, strict=True) if line != old) for lines in changed]


@pytest.mark.parametrize(
    ("body", "best"),
    [
        ("    assert f(1) == 9", "assert f(1) == 10"),
        ("    assert f(1) == -9", "assert f(1) == -10"),
        ("    assert f() == 'abc'", "assert f() == 'abd'"),
        ("    assert f() == 'to z!'", "assert f() == 'to y!'"),
        ("    assert f() == [{'a': (1, 2)}, []]", "assert f() == [{'a': (1, 3)}, []]"),
        ("    assert f() == list('abc')", "assert f() == list('abd')"),
        ("    assert f() == True", "assert f() == False"),
        ("    self.assertEqual(2, f())", "self.assertEqual(3, f())"),
        ("    self.assertEqual(f(), {'k': 'v'})", "self.assertEqual(f(), {'k': 'w'})"),
        ("    expected = ' '.join(['a', 'b'])\n    assert_equal(expected, f())", "expected = ' '.join(['a', 'c'])"),
        ("    assert f() == 1\n    assert f() == 5", "assert f() == 6"),
        ("    assert f() == r'\\d'", "assert f() == (r'\\d', None)"),
        ("    assert f() == other", "assert f() == (other, None)"),
        ("    assert f()", "assert not (f())"),
    ],
)
def test_the_best_way_is_another_value_that_reads_like_the_first(body: str, best: str) -> None:
    assert turned(body)[0] == best


def test_every_way_is_told_and_the_recognisable_ones_come_last() -> None:
    body = "    assert f() == 1\n    assert f() == x\n    assert g"
    assert turned(body) == [
        "assert f() == 2",
        "assert f() == (x, None)",
        "assert f() == (1, None)",
        "assert not (g)",
        "assert not (f() == x)",
        "assert not (f() == 1)",
    ]
    natural = [reads_naturally(edit) for edit in twist("t.py", f"def test_it():\n{body}\n".encode(), "t.py::test_it")]
    assert natural == [True, False, False, False, False, False]


def test_a_case_of_a_test_in_a_class_is_found_and_may_span_lines() -> None:
    data = b"class TestBox:\n    def test_fill(self, size):\n        assert box.fill(\n            size\n        ) == 'ab'\n"
    [best, *_] = twist("t.py", data, "t.py::TestBox::test_fill[case]")
    assert (best.old, best.new) == ("'ab'", "'ac'")


def test_what_asserts_nothing_cannot_be_turned_round() -> None:
    assert turned("    f()") == []
    assert list(twist("t.py", b"def test_other(): pass\n", "t.py::test_it")) == []
