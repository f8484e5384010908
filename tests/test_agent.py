"""The loop: when it stops, what takes effect at once, and what the model gets to see."""

import asyncio
from collections.abc import Callable, Sequence

import pytest
from playing import calling, done, play

from palestra import agent
from palestra.agent import CUT_OFF, Limits
from palestra.backends.scripted import Reply, ScriptedSession
from palestra.errors import InfrastructureError, ToolError
from palestra.hints.steps import steps_of
from palestra.message import Message, ToolCall, assistant, user
from palestra.policy import TokenPolicy
from palestra.protocols import Renderer, Sampling
from palestra.tool import Rewrite, Toolbox
from palestra.trajectory import Completion, Trajectory

PROMPT = [user("Begin.")]


def echo(text: str) -> str:
    """Say it back."""
    return f"You said {text}."


def refuse(why: str) -> str:
    """Never works."""
    raise ToolError(f"no, because {why}")


def forget(keep: str) -> Rewrite:
    """Begin anew."""
    return Rewrite((user(f"Go on with {keep}."),))


async def run(
    renderer: Renderer,
    *replies: Reply,
    tools: Sequence[Callable[..., object]] = (echo, refuse, forget, done),
    turns: int = 8,
    seconds: float = 60.0,
    context: int = 100_000,
    max_tokens: int = 1000,
    watch: agent.Watch = lambda _: None,
) -> Trajectory:
    policy = TokenPolicy(ScriptedSession(play(*replies), renderer), renderer, Sampling(max_tokens=max_tokens), context)
    trajectory = Trajectory("t", 0)
    await agent.run(policy, PROMPT, Toolbox(tools), Limits(turns, seconds), trajectory, watch)
    return trajectory


# Stops


async def test_a_tool_that_finishes_ends_the_run(renderer: Renderer) -> None:
    trajectory = await run(renderer, calling(("done", {"answer": "42"})), "never said")
    assert (trajectory.stop, trajectory.answer, len(trajectory.turns)) == ("finish", "42", 1)


async def test_a_reply_without_calls_is_the_answer(renderer: Renderer) -> None:
    trajectory = await run(renderer, calling(("echo", {"text": "hi"})), "It is 42.")
    assert (trajectory.stop, trajectory.answer, len(trajectory.turns)) == ("answer", "It is 42.", 2)


async def test_turns_run_out(renderer: Renderer) -> None:
    trajectory = await run(renderer, *[calling(("echo", {"text": "hi"}))] * 5, turns=3)
    assert (trajectory.stop, trajectory.answer, len(trajectory.turns)) == ("turns", None, 3)


async def test_the_context_runs_out(renderer: Renderer) -> None:
    context = len(renderer.prompt(PROMPT, Toolbox([echo]).schemas())) + 1000
    long = [calling(("echo", {"text": "word " * 40}))] * 9
    trajectory = await run(renderer, *long, tools=[echo], turns=9, context=context)
    assert trajectory.stop == "context"
    assert 1 < len(trajectory.turns) < 9
    assert all(end <= context for turn in trajectory.turns for end in turn.span), "a reply must end within the context"


async def test_a_reply_is_cut_where_the_context_ends(renderer: Renderer) -> None:
    opening = len(renderer.prompt(PROMPT, Toolbox([echo]).schemas()))
    trajectory = await run(renderer, "word " * 100, tools=[echo], context=opening + 7)
    assert trajectory.stop == "context"
    assert [turn.span for turn in trajectory.turns] == [(opening, opening + 7)]


async def test_a_prompt_that_fills_the_context_is_never_sampled_on(renderer: Renderer) -> None:
    opening = len(renderer.prompt(PROMPT, Toolbox([echo]).schemas()))
    trajectory = await run(renderer, "never said", tools=[echo], context=opening)
    assert (trajectory.stop, trajectory.turns, trajectory.sampled_tokens) == ("context", [], 0)


async def test_time_runs_out_in_a_tool(renderer: Renderer) -> None:
    ended = []

    async def wait() -> str:
        """Wait."""
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("wait")
        return "never"

    trajectory = await run(renderer, calling(("echo", {"text": "a"}), ("wait", {})), tools=[echo, wait], seconds=0.02)
    assert (trajectory.stop, trajectory.answer, ended) == ("time", None, ["wait"])
    [turn] = trajectory.turns
    assert [result.content for result in turn.results] == ["You said a."]


async def test_time_runs_out_while_sampling(renderer: Renderer) -> None:
    class Slow:
        async def sample(self, tokens: Sequence[int], sampling: Sampling) -> Completion:
            await asyncio.sleep(3600)
            raise AssertionError

    trajectory = Trajectory("t", 0)
    policy = TokenPolicy(Slow(), renderer, Sampling(), 1000)
    await agent.run(policy, PROMPT, Toolbox([echo]), Limits(3, 0.02), trajectory)
    assert (trajectory.stop, trajectory.turns, trajectory.sampled_tokens) == ("time", [], 0)
    assert len(trajectory.segments) == 1, "what was read so far is kept"


async def test_a_time_limit_of_a_tool_is_no_stop_of_the_run(renderer: Renderer) -> None:
    async def impatient() -> str:
        """Has a limit of its own."""
        async with asyncio.timeout(0):
            await asyncio.sleep(3600)
        return "never"

    with pytest.raises(TimeoutError):
        await run(renderer, calling(("impatient", {})), tools=[impatient])


async def test_being_cancelled_is_no_stop_of_the_run(renderer: Renderer) -> None:
    started = asyncio.Event()

    async def wait() -> str:
        """Wait."""
        started.set()
        await asyncio.sleep(3600)
        return "never"

    running = asyncio.create_task(run(renderer, calling(("wait", {})), tools=[wait]))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


# Effects


async def test_finish_takes_effect_at_once(renderer: Renderer) -> None:
    ran = []

    def note(text: str) -> str:
        """Note."""
        ran.append(text)
        return "noted"

    calls = calling(("note", {"text": "a"}), ("done", {"answer": "x"}), ("note", {"text": "b"}), ("done", {"answer": "y"}))
    trajectory = await run(renderer, calls, tools=[note, done])
    assert (trajectory.stop, trajectory.answer, ran) == ("finish", "x", ["a"])
    assert [result.content for result in trajectory.turns[0].results] == ["noted"]


async def test_a_rewrite_takes_effect_at_once_and_begins_a_segment(renderer: Renderer) -> None:
    calls = calling(("forget", {"keep": "tea"}), ("done", {"answer": "too early"}))
    trajectory = await run(renderer, calls, calling(("echo", {"text": "b"})), calling(("done", {"answer": "x"})))
    assert (trajectory.stop, trajectory.answer) == ("finish", "x")
    assert trajectory.openings == [tuple(PROMPT), (user("Go on with tea."),)]
    assert [turn.segment for turn in trajectory.turns] == [0, 1, 1]
    first, second = trajectory.segments
    assert "Go on with tea." in renderer.decode(second.tokens)
    assert "Begin." not in renderer.decode(second.tokens)
    assert first.mask[-1], "nothing is read behind the reply that rewrote the context"
    assert '"echo"' in renderer.decode(second.tokens[: trajectory.turns[1].span[0]]), "the tools are told again"


async def test_a_rewrite_in_the_last_turn_leaves_no_answer(renderer: Renderer) -> None:
    trajectory = await run(renderer, *[calling(("forget", {"keep": "it"}))] * 3, turns=3)
    assert (trajectory.stop, len(trajectory.segments), len(trajectory.turns)) == ("turns", 4, 3)
    assert trajectory.segments[-1].mask.count(True) == 0


async def test_a_call_that_the_model_got_wrong_does_not_keep_others_from_running(renderer: Renderer) -> None:
    calls = calling(("refuse", {"why": "so"}), ("eco", {"text": "a"}), ("echo", {"txt": "a"}), ("echo", {"text": "c"}))
    trajectory = await run(renderer, calls, "ok")
    texts = [result.text for result in trajectory.turns[0].results]
    assert texts[0] == "Error: no, because so"
    assert texts[1] == "Error: unknown tool 'eco'; did you mean 'echo'?"
    assert texts[2].startswith("Error: echo: argument 'text' is missing; unknown argument 'txt'; did you mean 'text'?")
    assert texts[3] == "You said c."
    assert [result.call_id for result in trajectory.turns[0].results] == ["call_0", "call_1", "call_2", "call_3"]


@pytest.mark.parametrize("error", [RuntimeError("broken"), InfrastructureError("no sandbox")])
async def test_any_other_exception_ends_the_run(renderer: Renderer, error: Exception) -> None:
    def broken() -> str:
        """Broken."""
        raise error

    with pytest.raises(type(error), match=str(error)):
        await run(renderer, calling(("broken", {})), tools=[broken])


# Observations


async def test_all_new_messages_reach_the_model(renderer: Renderer) -> None:
    broken = renderer.reply(assistant("", ToolCall("", "MARK", {})))
    fault = [*broken[:-5], broken[-1]]  # its closing has a hole
    replies: list[Reply] = [
        calling(("echo", {"text": "one"}), ("refuse", {"why": "two"}), ("nothing_like_it", {}), ("echo", {"text": "three"})),
        fault,
        "fine",
    ]
    trajectory = await run(renderer, *replies)
    assert trajectory.stop == "answer"
    text = renderer.decode(trajectory.segments[0].tokens)
    observed = [result.text for turn in trajectory.turns for result in turn.results]
    assert len(observed) == 5
    assert "could not be read" in observed[4]
    places = [text.index(f"<tool_response>\n{said}\n</tool_response>") for said in observed]
    assert places == sorted(places)


async def test_a_reply_that_was_cut_is_told_so_and_goes_on(renderer: Renderer) -> None:
    trajectory = await run(renderer, "word " * 50, "ok", max_tokens=20)
    assert [turn.finish for turn in trajectory.turns] == ["length", "stop"]
    assert (trajectory.stop, trajectory.answer) == ("answer", "ok")
    assert trajectory.turns[0].results == (user(CUT_OFF),)
    assert CUT_OFF in renderer.decode(trajectory.segments[0].tokens)


async def test_a_whole_call_in_a_reply_that_was_cut_still_runs(renderer: Renderer) -> None:
    cut = [token for token in renderer.reply(calling(("echo", {"text": "a"}))) if token not in renderer.stop_ids]
    trajectory = await run(renderer, cut, "ok", max_tokens=len(cut))
    assert [turn.finish for turn in trajectory.turns] == ["length", "stop"]
    assert [result.text for result in trajectory.turns[0].results] == ["You said a."]


async def test_onlookers_hear_every_message_in_order(renderer: Renderer) -> None:
    heard: list[Message] = []
    replies = [calling(("echo", {"text": "a"}), ("refuse", {"why": "b"})), calling(("forget", {"keep": "c"})), "ok"]
    trajectory = await run(renderer, *replies, watch=heard.append)
    assert heard == trajectory.messages
    assert [message.role for message in heard] == ["user", "assistant", "tool", "tool", "assistant", "user", "assistant"]


async def test_tools_may_be_asynchronous_and_results_structured(renderer: Renderer) -> None:
    async def count(to: int) -> list[int]:
        """Count."""
        await asyncio.sleep(0)
        return list(range(to))

    trajectory = await run(renderer, calling(("count", {"to": 3})), "ok", tools=[count])
    assert [result.content for result in trajectory.turns[0].results] == ["[0, 1, 2]"]


# Reminders


async def remember(renderer: Renderer, remind: int, turns: int) -> tuple[list[str], Trajectory]:
    replies = [calling(("echo", {"text": str(number)})) for number in range(turns)]
    policy = TokenPolicy(ScriptedSession(play(*replies), renderer), renderer, Sampling(max_tokens=1000), 5_000)
    trajectory = Trajectory("t", 0)
    limits = Limits(turns, 60.0, remind, 5_000)
    await agent.run(policy, PROMPT, Toolbox([echo]), limits, trajectory)
    return [turn.results[-1].text for turn in trajectory.turns], trajectory


async def test_the_agent_is_told_what_is_left_every_so_many_turns_and_before_the_last(renderer: Renderer) -> None:
    said, trajectory = await remember(renderer, remind=2, turns=6)
    left = [text.partition("[")[2].partition(" of ")[0] for text in said]
    assert left == ["", "4", "", "2", "1", ""]
    tokens = 5_000 - trajectory.turns[1].span[1]
    assert said[1] == f"You said 1.\n\n[4 of 6 turns and about {tokens:,} tokens are left]"
    written = renderer.decode(trajectory.segments[0].tokens)
    assert all(text in written for text in said[:-1])  # what was told is what the model read
    assert sum(trajectory.segments[0].mask) == trajectory.sampled_tokens


async def test_without_reminders_results_are_as_the_tools_gave_them(renderer: Renderer) -> None:
    said, _ = await remember(renderer, remind=0, turns=3)
    assert said == ["You said 0.", "You said 1.", "You said 2."]


async def test_a_reminder_makes_no_result_a_new_one(renderer: Renderer) -> None:
    _, trajectory = await remember(renderer, remind=1, turns=3)
    assert [done.result for step in steps_of(trajectory) for done in step.done] == ["You said 0.", "You said 1.", "You said 2."]
