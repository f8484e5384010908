"""A chat API as a policy: what is sent, what is recorded, what is charged, and how a conversation ends."""

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import pytest
from http_server import Answer, Asked, Said, Served, chat, play, refusal, serving

from palestra import agent
from palestra.backends.openai.chat import ChatPolicies
from palestra.backends.openai.client import Client
from palestra.backends.openai.limits import Limits
from palestra.config import OpenAI
from palestra.message import Message, system, user
from palestra.protocols import Sampling
from palestra.tool import Finish, Rewrite, Toolbox
from palestra.trajectory import Trajectory


def look(at: str, how: str = "well") -> str:
    """Look."""
    return f"there is {at}"


def done(answer: str) -> Finish:
    """Hand in."""
    return Finish(answer)


def forget() -> Rewrite:
    """Begin anew."""
    return Rewrite((user("again"),))


LOOK = ("look", '{"at": "a tree"}')
DONE = ("done", '{"answer": "42"}')
PROMPT = [system("Be good."), user("What is it?")]


async def run(
    answer: Answer, context: int = 1000, max_tokens: int = 50, turns: int = 5, **section: Any
) -> tuple[Trajectory, Served]:
    trajectory = Trajectory("t", 0)
    with serving(answer) as served:
        backend = OpenAI.model_validate({"kind": "openai", "base_url": served.url, "model": "m"} | section)
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(Client(served.url, None, None, Limits(None, None), 5.0, 5.0))
            policy = await stack.enter_async_context(ChatPolicies(client, backend).open(7, Sampling(0.5, max_tokens), context))
            await agent.run(policy, PROMPT, Toolbox([look, done, forget]), agent.Limits(turns, 60.0), trajectory)
    return trajectory, served


async def test_a_conversation() -> None:
    trajectory, served = await run(play(chat("hm", [LOOK]), chat(calls=[DONE])))
    assert (trajectory.stop, trajectory.answer) == ("finish", "42")
    first, second = [asked.body for asked in served.asked]
    assert first["messages"] == [{"role": "system", "content": "Be good."}, {"role": "user", "content": "What is it?"}]
    assert first["tools"] == Toolbox([look, done, forget]).schemas()
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("m", 0.5, 50)
    assert 0 <= first["seed"] < 2**31
    assert first["seed"] != second["seed"]
    assert second["messages"][2:] == [
        {
            "role": "assistant",
            "content": "hm",
            "tool_calls": [{"id": "id-look-0", "type": "function", "function": {"name": "look", "arguments": LOOK[1]}}],
        },
        {"role": "tool", "content": "there is a tree", "tool_call_id": "id-look-0"},
    ]
    assert served.asked[0].path == "/v1/chat/completions"
    assert [message.role for message in trajectory.messages] == ["system", "user", "assistant", "tool", "assistant"]


async def test_the_account_adds_up() -> None:
    trajectory, _ = await run(
        play(chat(calls=[LOOK]), refusal(503, Retry_After="0"), chat(calls=[DONE])), prices={"input": 1.0, "output": 10.0}
    )
    assert [turn.usage["retries"] for turn in trajectory.turns] == [0.0, 1.0]
    assert trajectory.usage["requests"] == 2.0
    assert trajectory.usage["prompt_tokens"] == 200.0
    assert trajectory.usage["cost"] == pytest.approx((200 * 1.0 + 20 * 10.0) / 1e6)


async def test_what_is_sent_can_be_changed() -> None:
    _, served = await run(
        play(chat(calls=[DONE])),
        strict=True,
        omit=["temperature", "seed"],
        limit_key="max_completion_tokens",
        extra={"reasoning_effort": "low"},
    )
    body = served.asked[0].body
    assert {"temperature", "seed", "max_tokens"} & body.keys() == set()
    assert (body["max_completion_tokens"], body["reasoning_effort"]) == (50, "low")
    assert body["tools"] == Toolbox([look, done, forget]).schemas(strict=True)
    assert body["tools"][0]["function"]["strict"] is True
    assert body["tools"][0]["function"]["parameters"]["required"] == ["at", "how"]


async def test_arguments_that_cannot_be_read_are_answered() -> None:
    trajectory, served = await run(play(chat(calls=[("look", '{"at": ')]), chat(calls=[DONE])))
    assert trajectory.stop == "finish"
    said = served.asked[1].body["messages"]
    assert said[-1]["content"].startswith("Error: The arguments of look could not be read: it was cut off")
    assert json.loads(said[-2]["tool_calls"][0]["function"]["arguments"]) == {"unreadable": '{"at": '}


async def test_a_rewrite_begins_a_new_conversation() -> None:
    trajectory, served = await run(play(chat(calls=[("forget", "{}")]), chat("ok")))
    assert served.asked[1].body["messages"] == [{"role": "user", "content": "again"}]
    assert [turn.segment for turn in trajectory.turns] == [0, 1]
    assert trajectory.stop == "answer"


async def test_ids_are_recorded_and_never_to_be_trained_on() -> None:
    trajectory, served = await run(
        play(
            chat(calls=[LOOK], prompt_token_ids=[1, 2, 3], token_ids=[4, 5]),
            chat(calls=[LOOK], prompt_token_ids=[1, 2, 3, 4, 5, 6, 7], token_ids=[8]),
            chat(calls=[LOOK], prompt_token_ids=[1, 2, 9, 9, 9, 9, 9, 9, 9], token_ids=[8]),  # the template changed what was said
            chat(calls=[DONE], prompt_token_ids=[1, 2, 3, 4, 5, 6, 7, 8, 10], token_ids=[11]),
        ),
        token_ids=True,
    )
    assert all(asked.body["return_token_ids"] is True for asked in served.asked)
    [segment] = trajectory.segments
    assert segment.tokens == [1, 2, 3, 4, 5, 6, 7, 8, 10, 11]
    assert not any(segment.mask)
    assert [turn.span for turn in trajectory.turns] == [(3, 5), (7, 8), (0, 0), (9, 10)]


async def test_without_ids_there_are_no_tokens() -> None:
    trajectory, served = await run(play(chat(calls=[DONE])))
    assert "return_token_ids" not in served.asked[0].body
    assert [len(segment) for segment in trajectory.segments] == [0]
    assert trajectory.sampled_tokens == 0


async def test_the_context_is_kept_to() -> None:
    trajectory, served = await run(play(chat(calls=[LOOK])), context=150, max_tokens=50)
    assert [asked.body["max_tokens"] for asked in served.asked] == [50, 40, 40, 40, 40]  # the server counts 110 each time
    assert trajectory.stop == "turns"
    trajectory, served = await run(play(chat(calls=[LOOK])), context=110)
    assert (trajectory.stop, len(served.asked)) == ("context", 1)
    trajectory, _ = await run(play(chat(calls=[LOOK]), refusal(400, "x", "context_length_exceeded")))
    assert (trajectory.stop, len(trajectory.turns)) == ("context", 1)


async def test_only_so_many_conversations_at_once() -> None:
    inside, most = 0, 0
    with serving(play(chat("x"))) as served:
        backend = OpenAI(kind="openai", base_url=served.url, model="m", concurrency=3)
        async with Client(served.url, None, None, Limits(None, None), 5.0, 5.0) as client:
            policies = ChatPolicies(client, backend)

            async def converse() -> None:
                nonlocal inside, most
                async with policies.open(0, Sampling(), 100) as policy:
                    inside += 1
                    most = max(most, inside)
                    await policy.begin([Message("user", "x")], [])
                    await policy.act()
                    inside -= 1

            async with asyncio.TaskGroup() as group:
                for _ in range(12):
                    group.create_task(converse())
    assert most == 3
    assert len(served.asked) == 12


async def test_a_server_that_sees_other_messages_would_be_noticed() -> None:
    """Every request holds all that was said so far, in order."""

    def answer(asked: Asked) -> Said:
        roles = [message["role"] for message in asked.body["messages"]]
        turns = (len(roles) - 2) // 2
        assert roles == ["system", "user", *["assistant", "tool"] * turns]
        return chat(calls=[DONE if turns == 3 else LOOK])

    trajectory, _ = await run(answer)
    assert (trajectory.stop, len(trajectory.turns)) == ("finish", 4)
