import time
from collections.abc import Callable
from pathlib import Path

import pytest

from palestra.errors import ModelError
from palestra.message import Message, ToolCall, assistant, system, user
from palestra.render.llama3 import Llama3, read_reply
from palestra.render.tokenizer import Own, load
from palestra.tool import Schema

MakeFolder = Callable[..., Path]
Reference = Callable[..., list[int]]

PARIS = ToolCall("call_0", "weather", {"city": "Paris"})
ROME = ToolCall("call_1", "weather", {"city": "Roma è bella"})
RAIN = Message("tool", 'It "rains"\nin Zürich', call_id="call_0", name="weather")

CONVERSATIONS: dict[str, list[Message]] = {
    "one question": [user(" What is the weather? ")],
    "several turns": [system(" S\n"), user("a"), assistant("b"), user("c\n"), assistant("d"), user("e")],
    "a call": [user("a"), assistant("", PARIS), RAIN],
    "calls and turns": [
        system("S"),
        user("a"),
        assistant("", PARIS),
        RAIN,
        assistant("done"),
        user("b"),
        assistant("", ROME),
        RAIN,
    ],
}


@pytest.fixture(scope="module")
def llama(make_folder: MakeFolder) -> Llama3:
    return Llama3(load(make_folder("llama3")))


@pytest.mark.parametrize("name", ["llama3_1", "llama3_2"])
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
@pytest.mark.parametrize("with_tools", [False, True])
def test_prompts_are_those_of_metas_template(
    make_folder: MakeFolder, reference: Reference, weather: list[Schema], name: str, messages: list[Message], with_tools: bool
) -> None:
    folder = make_folder("llama3")
    tools = weather if with_tools else []
    expected = reference(folder, name, messages, tools, date_string="26 Jul 2024")
    assert Llama3(load(folder)).prompt(messages, tools) == expected


def test_what_a_rollout_appends_gives_the_same_tokens(
    make_folder: MakeFolder, reference: Reference, weather: list[Schema]
) -> None:
    folder = make_folder("llama3")
    llama = Llama3(load(folder))
    tokens = llama.prompt([user("a")], weather) + llama.reply(assistant("", PARIS)) + llama.follow("stop", [RAIN, user("b")])
    assert tokens == reference(folder, "llama3_1", [user("a"), assistant("", PARIS), RAIN, user("b")], weather)


def test_follow_closes_only_what_was_cut(llama: Llama3) -> None:
    rest = "<|start_header_id|>user<|end_header_id|>\n\nz<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    assert llama.decode(llama.follow("stop", [user("z")])) == rest
    assert llama.decode(llama.follow("length", [user("z")])) == "<|eot_id|>" + rest


@pytest.mark.parametrize("separator", ["; ", ";", "\n", ";\n", " \n\n"])
def test_several_calls(separator: str) -> None:
    text = '{"name": "weather", "parameters": {"city": "Paris"}}'
    assert read_reply([text + separator + text]).calls == (PARIS, ToolCall("call_1", "weather", {"city": "Paris"}))


def test_a_call_after_text_begins_a_line() -> None:
    message = read_reply(['I look.\n  {"name": "weather", "parameters": {"city": "Paris"}}\nDone.'])
    assert message == assistant("I look.\nDone.", PARIS)


@pytest.mark.parametrize("text", ['Say {"name": "a", "parameters": {}}.', '{"answer": 42}', "{", "", 'a; {"name": "b"}'])
def test_other_json_is_text(text: str) -> None:
    assert read_reply([text]) == assistant(text)


def test_behind_the_tag_all_is_calls(llama: Llama3) -> None:
    tokens = llama._tokenizer.encode(["Well. ", Own("<|python_tag|>"), '{"parameters": {"city": "Paris"}, "name": "weather"}'])
    assert llama.parse(tokens) == assistant("Well. ", PARIS)
    [call] = llama.parse(llama._tokenizer.encode([Own("<|python_tag|>"), "print(1)"])).calls
    assert '"parameters"' in (call.fault or "")
    assert llama.parse(llama._tokenizer.encode(["<|python_tag|>print(1)"])) == assistant("<|python_tag|>print(1)")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"name": "look", "parameters": {"at": "it', "cut off"),
        ('{"name": "look", "parameters": {"at": 1', "cut off"),
        ('{"name": "look"}', 'no "parameters"'),
        ('{"name": "look", "parameters": 3}', "must be a JSON object"),
        ('{"name": "look", "parameters": {it}}', "broken"),
    ],
)
def test_faults(text: str, reason: str) -> None:
    [call] = read_reply([text]).calls
    assert call.name == "look"
    assert reason in (call.fault or "")


def test_a_broken_call_does_not_hide_the_next() -> None:
    first, second = read_reply(['{"name": "a", "parameters": {\n{"name": "b", "parameters": {}}']).calls
    assert (first.fault is None, second) == (False, ToolCall("call_1", "b", {}))


@pytest.mark.parametrize(
    "text",
    [
        '{"name":\n',
        '{"name": "a", "parameters": {}}; ',
        '\n{"name": "a\n',
        "\n{",
        '{"name": ',
        '\n{"name": [',
        "\n \t",
        '\n{"name"   ',
    ],
)
def test_reading_takes_linear_time_and_at_most_16_calls(text: str) -> None:
    start = time.perf_counter()
    calls = read_reply([text * 20_000]).calls
    assert time.perf_counter() - start < 1.0
    assert len(calls) <= 17


def test_tools_need_a_user_message(llama: Llama3, weather: list[Schema]) -> None:
    with pytest.raises(ModelError, match="first user message"):
        llama.prompt([system("S")], weather)


def test_another_tokenizer_is_refused(make_folder: MakeFolder) -> None:
    with pytest.raises(ModelError, match="no Llama 3"):
        Llama3(load(make_folder("smollm2")))
