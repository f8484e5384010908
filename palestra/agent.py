"""The agent loop: act, run the tools, observe. All new messages are observed, errors included."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from palestra import config
from palestra.errors import ToolError
from palestra.hints import Hints
from palestra.message import Message, ToolCall, user
from palestra.protocols import Policy
from palestra.reminders import remind
from palestra.tool import ERROR, Finish, Outcome, Rewrite, Toolbox
from palestra.trajectory import Span, Stop, Trajectory, now

CUT_OFF = "Your reply was cut off at its length limit before it called a tool. Be brief, and call a tool."


@dataclass(frozen=True, slots=True)
class Limits:
    turns: int
    seconds: float
    remind: int = 0
    """Every so many turns, say what is left; 0: never."""
    context: int = 0
    """Tokens of a segment, for that."""

    @staticmethod
    def of(section: config.Agent) -> "Limits":
        return Limits(section.turns, section.seconds, section.remind, section.context)


Watch = Callable[[Message], None]
"""Told of every message as it is said, for people who look on."""


async def run(
    policy: Policy,
    prompt: Sequence[Message],
    tools: Toolbox,
    limits: Limits,
    trajectory: Trajectory,
    watch: Watch = lambda _: None,
    hints: Hints | None = None,
) -> None:
    """Let the policy work until a tool finishes, a reply calls no tool, or a budget is used up. Fills the trajectory."""
    trajectory.segments = policy.segments
    trajectory.hints = None if hints is None else []
    try:
        async with asyncio.timeout(limits.seconds) as budget:
            trajectory.stop = await _converse(policy, prompt, tools, limits, trajectory, watch, hints)
    except TimeoutError:
        if not budget.expired():  # a tool's own time limit is no stop of the run
            raise
        trajectory.stop = "time"
    if hints is not None:
        hints.conclude(trajectory)


async def _converse(
    policy: Policy,
    prompt: Sequence[Message],
    tools: Toolbox,
    limits: Limits,
    trajectory: Trajectory,
    watch: Watch,
    hints: Hints | None,
) -> Stop:
    await _begin(policy, prompt, tools, trajectory, watch)
    for _ in range(limits.turns):
        asked = now()
        turn = await policy.act()
        trajectory.spans.append(Span("sample", asked, now()))
        if turn is None:
            return "context"
        trajectory.turns.append(turn)
        trajectory.charge(turn.usage)
        watch(turn.message)
        if not turn.message.calls:
            if turn.finish == "stop":
                trajectory.answer = turn.message.text
                return "answer"
            turn.results = (user(CUT_OFF),)
            watch(turn.results[0])
        else:
            called = now()
            effect = await _run_calls(tools, trajectory, watch, hints)
            trajectory.spans.append(Span("tool", called, now()))
            if isinstance(effect, Finish):
                trajectory.answer = effect.answer
                return "finish"
            if isinstance(effect, Rewrite):
                await _begin(policy, effect.messages, tools, trajectory, watch)
                continue
        if hints is not None:
            if hints.stuck(trajectory):
                return "stuck"
            if (hint := hints.give(trajectory, tools.schemas())) is not None:
                watch(user(hint))
        if (said := remind(trajectory, limits.remind, limits.turns, limits.context)) is not None:
            watch(user(said))
        await policy.observe(turn.results)
    return "turns"


async def _begin(policy: Policy, messages: Sequence[Message], tools: Toolbox, trajectory: Trajectory, watch: Watch) -> None:
    trajectory.openings.append(tuple(messages))
    for message in messages:
        watch(message)
    await policy.begin(messages, tools.schemas())


async def _run_calls(tools: Toolbox, trajectory: Trajectory, watch: Watch, hints: Hints | None) -> Finish | Rewrite | None:
    """Run the last turn's calls in order. `Finish` and `Rewrite` take effect at once: the calls behind them do not run."""
    turn = trajectory.turns[-1]
    for call in turn.message.calls:
        outcome = await _run_call(tools, call)
        if isinstance(outcome, Finish) and hints is not None:
            outcome = hints.reconsider(outcome, trajectory, tools.schemas()) or outcome
        if isinstance(outcome, Finish | Rewrite):
            return outcome
        result = Message("tool", outcome, call_id=call.id, name=call.name)
        turn.results = (*turn.results, result)
        watch(result)
    return None


async def _run_call(tools: Toolbox, call: ToolCall) -> Outcome:
    try:
        return await tools.run(call)
    except ToolError as error:
        return f"{ERROR}{error}"
