import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from palestra.errors import ModelError
from palestra.message import Image, Message, Text, ToolCall, assistant, system, user
from palestra.render.hermes import PLAIN, QWEN2_5, QWEN3, SMOLLM3, Hermes
from palestra.render.tokenizer import Own, load
from palestra.tool import Schema

MakeFolder = Callable[..., Path]
Reference = Callable[..., list[int]]

PARIS = ToolCall("call_0", "weather", {"city": "Paris"})
ROME = ToolCall("call_1", "weather", {"city": "Roma è bella", "days": [1, None, 2.5]})


def result(text: str) -> Message:
    return Message("tool", text, call_id="call_0", name="weather")


CONVERSATIONS: dict[str, list[Message]] = {
    "one question": [user("What is the weather?")],
    "with a system message": [system("Be brief.\n"), user("  What? ")],
    "an empty system message": [system(""), user("What?")],
    "several turns": [system("S"), user("a"), assistant("b"), user("c\n"), assistant("\n\nd"), user("e")],
    "a call": [user("a"), assistant("", PARIS), result("rain")],
    "calls with text": [system("S"), user("a"), assistant("I look.", PARIS, ROME), result("rain"), result('{"sun": 1}')],
    "calls and turns": [
        user("a"),
        assistant("", PARIS),
        result("x"),
        assistant("done"),
        user("b"),
        assistant("", ROME),
        result("y"),
    ],
    "a late system message": [user("a"), assistant("b"), system("c"), user("d")],
    "results and a hint": [user("a"), assistant("", PARIS), result("x"), user("Use it.")],
}


@pytest.fixture(scope="module")
def qwen3(make_folder: MakeFolder) -> Hermes:
    return Hermes(load(make_folder("qwen3")), QWEN3, "keep")


@pytest.fixture(scope="module")
def smollm2(make_folder: MakeFolder) -> Hermes:
    return Hermes(load(make_folder("smollm2")))


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
@pytest.mark.parametrize("with_tools", [False, True])
class TestAgainstTheFamiliesOwnTemplates:
    def test_qwen2_5(
        self, make_folder: MakeFolder, reference: Reference, weather: list[Schema], messages: list[Message], with_tools: bool
    ) -> None:
        folder = make_folder("qwen2.5")
        tools = weather if with_tools else []
        renderer = Hermes(load(folder), QWEN2_5)
        assert renderer.prompt(messages, tools) == reference(folder, "qwen2_5", messages, tools)

    @pytest.mark.parametrize("thinking", ["off", "keep"])
    def test_qwen3(
        self,
        make_folder: MakeFolder,
        reference: Reference,
        weather: list[Schema],
        messages: list[Message],
        with_tools: bool,
        thinking: str,
    ) -> None:
        folder = make_folder("qwen3")
        tools = weather if with_tools else []
        renderer = Hermes(load(folder), QWEN3, "off" if thinking == "off" else "keep")
        expected = reference(folder, "qwen3", messages, tools, enable_thinking=thinking == "keep")
        assert renderer.prompt(messages, tools) == expected


# In these a reply begins with a line break, which a model writes apart from the prompt's last one.
APART = {"several turns"}


@pytest.mark.parametrize("messages", [said for name, said in CONVERSATIONS.items() if name not in APART])
@pytest.mark.parametrize("with_tools", [False, True])
def test_what_a_rollout_appends_gives_the_tokens_of_the_template(
    make_folder: MakeFolder, reference: Reference, weather: list[Schema], messages: list[Message], with_tools: bool
) -> None:
    folder = make_folder("qwen3")
    tools = weather if with_tools else []
    renderer = Hermes(load(folder), PLAIN)
    tokens: list[int] = []
    for opening, reply in _rollout(messages):
        tokens += renderer.follow("stop", opening) if tokens else renderer.prompt(opening, tools)
        tokens += renderer.reply(reply) if reply else []
    assert tokens == reference(folder, "qwen3_instruct_2507", messages, tools)


def _rollout(messages: Sequence[Message]) -> list[tuple[list[Message], Message | None]]:
    """The conversation as what is read and what is replied to it, in turns."""
    steps: list[tuple[list[Message], Message | None]] = []
    read: list[Message] = []
    for message in messages:
        if message.role == "assistant":
            steps.append((read, message))
            read = []
        else:
            read.append(message)
    return [*steps, (read, None)]


def test_thinking_of_the_present_question_stands_as_in_qwen3s_template(make_folder: MakeFolder, reference: Reference) -> None:
    folder = make_folder("qwen3")
    messages = [user("a"), Message("assistant", "b", (PARIS,), thinking="hm\n\nhm"), result("x")]
    assert Hermes(load(folder), QWEN3, "keep").prompt(messages, []) == reference(folder, "qwen3", messages, [])


def test_earlier_thinking_is_kept(qwen3: Hermes) -> None:
    thought = Message("assistant", "b", thinking="hm")
    text = qwen3.decode(qwen3.prompt([user("a"), thought, user("c")], []))
    assert text == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )


def test_no_system_text_is_invented(smollm2: Hermes, weather: list[Schema]) -> None:
    assert smollm2.decode(smollm2.prompt([user("a")], [])) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert smollm2.decode(smollm2.prompt([user("a")], weather)).startswith("<|im_start|>system\n# Tools\n\nYou may call")
    assert smollm2.decode(smollm2.prompt([], [])) == "<|im_start|>assistant\n"


def test_thinking_off_opens_each_reply_with_an_empty_thought(make_folder: MakeFolder) -> None:
    for dialect, ending in ((QWEN3, "<think>\n\n</think>\n\n"), (SMOLLM3, "<think>\n\n</think>\n"), (PLAIN, "assistant\n")):
        renderer = Hermes(load(make_folder("smollm3")), dialect)
        assert renderer.decode(renderer.prompt([user("a")], [])).endswith(ending)
        assert renderer.decode(renderer.follow("stop", [user("a")])).endswith(ending)


def test_follow_closes_only_what_was_cut(smollm2: Hermes) -> None:
    rest = "\n<|im_start|>user\n<tool_response>\nx\n</tool_response>\n<tool_response>\ny\n</tool_response><|im_end|>\n"
    rest += "<|im_start|>user\nz<|im_end|>\n<|im_start|>assistant\n"
    messages = [result("x"), result("y"), user("z")]
    assert smollm2.decode(smollm2.follow("stop", messages)) == rest
    assert smollm2.decode(smollm2.follow("length", messages)) == "<|im_end|>" + rest


def test_a_stop_token_ends_the_reply(smollm2: Hermes) -> None:
    assert smollm2.decode([*smollm2.stop_ids]).count("<|") == 2
    for stop in smollm2.stop_ids:
        assert smollm2.parse([*smollm2.reply(assistant("a"))[:-1], stop]) == assistant("a")


def said(renderer: Hermes, *pieces: str | Own) -> Message:
    return renderer.parse(renderer._tokenizer.encode(pieces))


def test_only_marker_tokens_make_a_call_where_the_family_has_them(qwen3: Hermes) -> None:
    spelled = '<think>\nno\n</think>\n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>'
    assert said(qwen3, spelled) == assistant(spelled)
    call = ToolCall("call_0", "a", {"text": "</tool_call><tool_call>"})
    written = said(
        qwen3, Own("<tool_call>"), '{"name": "a", "arguments": {"text": "</tool_call><tool_call>"}}', Own("</tool_call>")
    )
    assert written == assistant("", call)


def test_letters_make_a_call_where_the_family_has_no_markers(smollm2: Hermes) -> None:
    assert said(smollm2, '<tool_call>{"name": "a", "arguments": {}}</tool_call>') == assistant("", ToolCall("call_0", "a", {}))


def test_text_around_calls_is_content(smollm2: Hermes) -> None:
    call = '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>'
    message = said(smollm2, f"First.\n{call}\n{call}\nLast.</tool_call>")
    assert message.content == "First.\nLast.</tool_call>"
    assert [call.id for call in message.calls] == ["call_0", "call_1"]


@pytest.mark.parametrize(
    "body", ['{"name": "look", "argu', '{"name": "look", "arguments": {}}', '{"name": "look", "arguments": {}}\n</tool']
)
def test_an_unclosed_call_was_cut_off(smollm2: Hermes, body: str) -> None:
    message = said(smollm2, "Well.\n<tool_call>\n" + body)
    [call] = message.calls
    assert message.content == "Well."
    assert call.name == "look"
    assert "was cut off" in (call.fault or "")


def test_a_call_that_is_opened_again_is_a_fault_and_the_next_is_read(smollm2: Hermes) -> None:
    good = '<tool_call>{"name": "b", "arguments": {}}</tool_call>'
    first, second = said(smollm2, '<tool_call>{"name": "a"' + good).calls
    assert (first.name, first.fault is None, second) == ("a", False, ToolCall("call_1", "b", {}))


def test_thinking_is_no_content_and_makes_no_calls(qwen3: Hermes) -> None:
    call = (Own("<tool_call>"), '{"name": "a", "arguments": {}}', Own("</tool_call>"))
    message = said(qwen3, Own("\n<think>\n"), "Shall I? ", *call, Own("\n</think>\n\n"), "Yes.\n", *call)
    assert message.thinking == 'Shall I? <tool_call>{"name": "a", "arguments": {}}</tool_call>'
    assert (message.content, len(message.calls)) == ("Yes.", 1)


def test_thinking_that_was_cut_takes_all(qwen3: Hermes) -> None:
    assert said(qwen3, Own("<think>"), "Hm", Own("<tool_call>")) == Message("assistant", thinking="Hm<tool_call>")


def test_a_think_mark_in_the_middle_is_text(qwen3: Hermes) -> None:
    assert said(qwen3, "a", Own("<think>"), "b", Own("</think>")) == assistant("a<think>b</think>")


def test_calls_beyond_the_limit_are_one_fault(smollm2: Hermes) -> None:
    calls = said(smollm2, '<tool_call>{"name": "a", "arguments": {}}</tool_call>' * 30).calls
    assert len(calls) == 17
    assert all(call.fault is None for call in calls[:16])
    assert (calls[16].id, calls[16].name) == ("call_16", "")
    assert "at most 16" in (calls[16].fault or "")


@pytest.mark.parametrize("text", ["<tool_call>", "</tool_call>", "<think>", '<tool_call>{"name": "', "<tool_call></think>"])
def test_reading_takes_linear_time(smollm2: Hermes, text: str) -> None:
    def seconds(times: int) -> float:
        tokens = smollm2._tokenizer.encode([text * times])
        start = time.thread_time()
        smollm2.parse(tokens)
        return time.thread_time() - start

    assert seconds(20_000) < 10  # some 0.1 s of CPU time; quadratic code would take minutes


def test_images_are_refused(smollm2: Hermes) -> None:
    with pytest.raises(ModelError, match="takes text only"):
        smollm2.prompt([user((Text("see"), Image(b"")))], [])
    assert smollm2.prompt([user((Text("see"), Text(" it")))], []) == smollm2.prompt([user("see it")], [])


def test_what_cannot_be_learnt_is_refused(make_folder: MakeFolder) -> None:
    renderer = Hermes(load(make_folder("qwen3")), QWEN3, "off")
    with pytest.raises(ModelError, match="thinking is off"):
        renderer.reply(Message("assistant", "a", thinking="b"))
    with pytest.raises(ModelError, match="no target for training"):
        renderer.reply(assistant("", ToolCall("call_0", "a", {}, "broken")))


def test_a_tokenizer_without_chatml_is_refused(make_folder: MakeFolder) -> None:
    with pytest.raises(ModelError, match=r"no <\|im_start\|>"):
        Hermes(load(make_folder("llama3")))
