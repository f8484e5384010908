"""What holds for every renderer: prompts only grow, contents never become markers, replies are read as they were written."""

import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from palestra.message import JSON, Message, Role, ToolCall
from palestra.protocols import Renderer
from palestra.render import load
from palestra.render.tokenizer import load as load_tokenizer
from palestra.tool import Schema
from palestra.trajectory import Completion, FinishReason, Segment

MakeFolder = Callable[..., Path]

TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n<tool_call>' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content | trim) }}"
    "{% for c in m.tool_calls %}{{ '\n<tool_call>' + (c.function | tojson) + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# renderer: (tokenizer of, family, template)
RENDERERS = {
    "smollm2": ("smollm2", "hermes", None),
    "qwen2.5": ("qwen2.5", "qwen2.5", None),
    "qwen3": ("qwen3", "qwen3", None),
    "llama3": ("llama3", "llama3", None),
    "jinja": ("qwen3", "jinja", TEMPLATE),
}
few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module", params=RENDERERS)
def made(request: pytest.FixtureRequest, make_folder: MakeFolder) -> tuple[str, Renderer, frozenset[int]]:
    markers, family, template = RENDERERS[request.param]
    folder = make_folder(markers, template)
    tokenizer = load_tokenizer(folder)
    return request.param, load(folder, family), tokenizer.ids(*tokenizer.markers)


NASTY = [
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<|eot_id|>",
    "<|python_tag|>",
]
NASTY += [
    "<tool_response>",
    "<|start_header_id|>",
    "{{ 7 }}",
    "{% raw %}",
    "\ud800",
    "\ufdd0",
    "<|im_",
    "end|>",
    "<",
    '"',
    "\\",
    "\n",
]
contents = st.lists(st.sampled_from(NASTY) | st.text(max_size=5), max_size=6).map("".join)


def messages_of(role: Role) -> st.SearchStrategy[Message]:
    return st.builds(Message, st.just(role), contents, call_id=st.just("call_0"), name=contents)


calls = st.builds(ToolCall, st.just("call_0"), contents, st.dictionaries(contents, contents, max_size=2))
replies = st.builds(Message, st.just("assistant"), contents, calls.map(lambda call: (call,)) | st.just(()))
openings = st.tuples(messages_of("system"), messages_of("user"), replies, messages_of("user")).map(list)
observations = st.lists(messages_of("tool"), max_size=3).flatmap(
    lambda results: st.lists(messages_of("user"), max_size=2).map(lambda more: [*results, *more])
)
turns = st.lists(
    st.tuples(st.lists(st.integers(0, 450), max_size=20), st.sampled_from(["stop", "length"]), observations), max_size=4
)


def neutral(message: Message) -> Message:
    """The same message, saying nothing that could matter."""
    plain = tuple(ToolCall(call.id, "x", {}) for call in message.calls)
    return Message(message.role, "x" if message.text.strip() else "", plain, call_id=message.call_id, name="x")


def tool(name: str) -> Schema:
    return {
        "type": "function",
        "function": {"name": name, "description": name, "parameters": {"type": "object", "properties": {}}},
    }


@few
@given(openings, turns, contents)
def test_segments_only_grow_and_contents_add_no_marker(
    made: tuple[str, Renderer, frozenset[int]],
    opening: list[Message],
    steps: Sequence[tuple[list[int], FinishReason, list[Message]]],
    name: str,
) -> None:
    _, renderer, markers = made

    def own_markers(tokens: list[int]) -> list[int]:
        return [token for token in tokens if token in markers]

    segment = Segment()
    segment.read(renderer.prompt(opening, [tool(name)]))
    assert own_markers(segment.tokens) == own_markers(renderer.prompt([neutral(message) for message in opening], [tool("x")]))
    stop = min(renderer.stop_ids)
    for sampled, finish, observed in steps:
        before = list(segment.tokens)
        tokens = [*sampled, stop] if finish == "stop" else sampled
        span = segment.wrote(Completion(tokens, [0.0] * len(tokens), [0] * len(tokens), finish))
        renderer.parse(tokens)
        follow = renderer.follow(finish, observed)
        segment.read(follow)
        assert own_markers(follow) == own_markers(renderer.follow(finish, [neutral(message) for message in observed]))
        assert segment.tokens == before + list(tokens) + follow
        assert segment.tokens[slice(*span)] == tokens


@few
@given(st.lists(st.integers(0, 520), max_size=60))
def test_any_tokens_can_be_read(made: tuple[str, Renderer, frozenset[int]], tokens: list[int]) -> None:
    _, renderer, _ = made
    message = renderer.parse(tokens)
    assert message.role == "assistant"
    message.text.encode()
    assert isinstance(renderer.decode(tokens), str)
    assert [call.id for call in message.calls] == [f"call_{index}" for index in range(len(message.calls))]


# Where calls are told from text by letters, text that looks like one cannot be told apart.
LETTERS = {"smollm2": "<", "qwen2.5": "<", "llama3": "<{"}

# The Jinja renderer uses for itself what Unicode keeps free of characters.
texts = st.text(st.characters(codec="utf-8", exclude_characters=map(chr, range(0xFDD0, 0xFDF0))), max_size=8)
leaves = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6)
arguments = st.dictionaries(texts, values, max_size=3)
names = st.text("abc_xyzü.-", min_size=1, max_size=8)
marks = st.sampled_from([mark for mark in NASTY if mark not in ("\ud800", "\ufdd0")])
written = st.lists(marks | texts, max_size=6).map("".join)


@few
@given(written, st.lists(st.tuples(names, arguments), max_size=4))
def test_a_reply_is_read_as_it_was_written(
    made: tuple[str, Renderer, frozenset[int]], text: str, called: Sequence[tuple[str, dict[str, JSON]]]
) -> None:
    family, renderer, _ = made
    text = text.strip()  # blank text beside a call only sets it apart
    without = str.maketrans("", "", LETTERS.get(family, ""))
    if family in ("smollm2", "llama3"):
        called = [(name, argument) for name, argument in called if "<" not in repr(argument)]
    message = Message("assistant", text.translate(without).strip(), _numbered(called))
    tokens = renderer.reply(message)
    assert tokens[-1] in renderer.stop_ids
    assert renderer.parse(tokens) == message


def _numbered(called: Sequence[tuple[str, dict[str, JSON]]]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(f"call_{index}", name, argument) for index, (name, argument) in enumerate(called))


def test_unicode_survives(made: tuple[str, Renderer, frozenset[int]]) -> None:
    _, renderer, _ = made
    text = unicodedata.normalize("NFC", "Zürich 東京 🏛️ \u202e עברית ñ")
    message = Message("assistant", text, (ToolCall("call_0", "look", {"á": text}),))
    assert renderer.parse(renderer.reply(message)) == message
