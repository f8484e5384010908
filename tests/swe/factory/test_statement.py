"""Problem statements: written from tests alone."""

from palestra.swe.factory.statement import behaviour, shown, statement
from palestra.swe.factory.trials import Told

TESTS = b"""
def test_cut_at_end():
    text = "abcd"
    assert cut(
        text, 2
    ) == "ab"
    assert len(cut(text, 3)) == 3


class TestBox:
    def test_fill(self):
        self.assertEqual(3, box.fill(3))
        assert box.full
"""


def test_a_statement_says_what_fails() -> None:
    told = Told("AssertionError: assert 'a' == 'ab'", "tests/test_cut.py", 5)
    text = statement(
        "cutter 1.0", "tests/test_cut.py::test_cut_at_end", told, TESTS, ["tests/test_cut.py::TestBox::test_fill[2]"]
    )
    assert text == (
        "cutter 1.0: cut at end does not work as it should.\n\n"
        'This fails:\n\n```python\nassert cut(\n    text, 2\n) == "ab"\n```\n\n'
        "with\n\n```\nAssertionError: assert 'a' == 'ab'\n```\n\n"
        "Also affected: box: fill."
    )


def test_behaviour_in_words() -> None:
    assert behaviour("t/test_x.py::TestCutter::test_at_end[3-a::b]") == "cutter: at end"
    assert behaviour("t/test_x.py::test_HTMLParser") == "htmlparser"
    assert behaviour("t/test_x.py::test") == "something"


def test_what_is_long_is_not_shown() -> None:
    assert shown(b"x = [\n" + b"1,\n" * 20 + b"]\n", 3) == ""
    assert shown(TESTS, None) == ""
