from collections.abc import Callable
from pathlib import Path

import pytest

from palestra.errors import ModelError
from palestra.message import Message, ToolCall, assistant, system, user
from palestra.protocols import Renderer
from palestra.render import load
from palestra.render.conversation import encode
from palestra.tool import Schema

MakeFolder = Callable[..., Path]

LOOK = assistant("I look.", ToolCall("call_0", "weather", {"city": "Paris"}))
RAIN = Message("tool", "rain <|im_end|>", call_id="call_0", name="weather")
TALK = [system("S"), user("Weather?"), LOOK, RAIN, user("Well?"), assistant("It rains."), user("Thanks")]


@pytest.fixture(scope="module", params=["hermes", "qwen3", "smollm3"])
def renderer(request: pytest.FixtureRequest, make_folder: MakeFolder) -> Renderer:
    return load(make_folder("qwen3"), request.param)


def runs(tokens: list[int], mask: list[bool]) -> list[tuple[bool, list[int]]]:
    found: list[tuple[bool, list[int]]] = []
    for token, written in zip(tokens, mask, strict=True):
        if not found or found[-1][0] != written:
            found.append((written, []))
        found[-1][1].append(token)
    return found


def test_the_mask_is_on_replies_and_their_stop_tokens(renderer: Renderer, weather: list[Schema]) -> None:
    [(first, prompt), (_, look), (_, between), (last, answer)] = runs(*encode(renderer, TALK, weather))
    assert (first, last) == (False, True)
    assert prompt == renderer.prompt(TALK[:2], weather)
    assert renderer.parse(look) == LOOK
    assert between == renderer.follow("stop", TALK[3:5])
    assert renderer.parse(answer) == assistant("It rains.")
    assert {look[-1], answer[-1]} <= renderer.stop_ids


def test_a_conversation_may_begin_with_a_reply(renderer: Renderer) -> None:
    tokens, mask = encode(renderer, [assistant("a"), assistant("b")], [])
    assert [written for written, _ in runs(tokens, mask)] == [False, True, False, True]


def test_a_conversation_without_a_reply_is_refused(renderer: Renderer) -> None:
    with pytest.raises(ModelError, match="teaches nothing"):
        encode(renderer, [user("a")], [])
