import pytest

from palestra.message import ToolCall
from palestra.render.calls import CallFormat

FORMAT = CallFormat(("arguments",), "<the example>")


def wrapped(value: str) -> str:
    return '{"name": "look", "arguments": {"at": ' + value + "}}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (wrapped("NaN"), "NaN is no JSON value"),
        (wrapped("-Infinity"), "-Infinity is no JSON value"),
        (wrapped("1e999"), "the number 1e999 is too large"),
        (wrapped('{"a": 1, "b": 2, "a": 3}'), "the key 'a' occurs twice"),
        (wrapped("[" * 1_000_000), "nested too deeply"),
        (wrapped("[" * 200 + "]" * 200), "nested too deeply"),
        (wrapped("9" * 5000), "has 5000 digits"),
        (wrapped('"\\ud800"'), "half of a surrogate pair"),
        (wrapped('"two\nlines"'), "write them as \\n"),
        (wrapped("it"), "broken at character 37"),
        (wrapped('"it'), "not closed"),
        (wrapped("{"), "not closed"),
        (wrapped("1") + " and more", "more text after its JSON object: ' and more'"),
        ('{"name": "look"}', 'it has no "arguments"'),
        ('{"name": "look", "arguments": [1]}', '"arguments" must be a JSON object'),
        ('{"name": "look", "arguments": "{}"}', '"arguments" must be a JSON object'),
    ],
    ids=lambda text: text[:60],
)
def test_a_fault_says_what_is_wrong_and_keeps_the_name(text: str, reason: str) -> None:
    call = FORMAT.read(text, 3)
    assert (call.id, call.name, call.arguments) == ("call_3", "look", {})
    assert call.fault is not None
    assert call.fault.endswith("The right format is:\n<the example>")
    assert len(call.fault) < 400
    assert reason in call.fault


@pytest.mark.parametrize(
    "text", ["", "  ", "[]", "3", '{"arguments": {}}', '{"name": 3, "arguments": {}}', '{"name": "", "arguments": {}}']
)
def test_a_call_without_a_name_is_a_fault_without_one(text: str) -> None:
    call = FORMAT.read(text, 0)
    assert call.name == ""
    assert call.fault


def test_a_right_call_is_read() -> None:
    text = ' {"id": 7, "name": "look", "arguments": {"at": [1, 2.5e3, true, null, "\\u00fc\\ud83d\\ude00"]}}\n'
    assert FORMAT.read(text, 0) == ToolCall("call_0", "look", {"at": [1, 2500.0, True, None, "ü😀"]})
