"""Hints: each rule at its threshold and not before it, the budgets, the effect, the switch, and no trace of them when off."""

import ast
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from conftest import MakeFolder
from playing import Dice, Probe, calling, play

from palestra import agent, config, hints
from palestra.agent import Limits
from palestra.backends.scripted import Reply, ScriptedSession
from palestra.collect import Collector
from palestra.dispatch.bounded import Bounded
from palestra.errors import ConfigError, ToolError
from palestra.hints import APART, PER_EPISODE, TOKENS
from palestra.hints.rules import RULES
from palestra.ledger import Ledger
from palestra.ledger.packing import pack, pack_segment
from palestra.message import Message
from palestra.pace import Pace
from palestra.policy import TokenPolicies, TokenPolicy
from palestra.protocols import Renderer, Sampling
from palestra.render import load
from palestra.sandbox.local import LocalSandbox
from palestra.tool import Finish, Toolbox
from palestra.tools.workspace import Workspace
from palestra.trajectory import Key, Trajectory

ROOT = Path(__file__).parents[1]


# Tools whose results follow from their arguments, by the names that coding agents know.


def bash(command: str) -> str:
    """Run."""
    return "[exit code 1]" if "nothing" in command else f"did {command}\n[exit code 0]"


def view(path: str) -> str:
    """Look."""
    return f"     1\tlines of {path}"


def edit(path: str, old: str, new: str) -> str:
    """Change."""
    if old == "wrong":
        raise ToolError(f"old is not in {path}. These lines are nearest:\n     7\tright\n     8\tas well")
    return f"{path} is edited."


def search_symbol(name: str) -> str:
    """Search."""
    return f"No definition of {name!r} (3 source files searched)." if "nothing" in name else f"{name} is at a.py:3"


def finish(answer: str, changed: bool | None = None) -> Finish:
    """End."""
    return Finish(answer, changed)


TOOLS: Sequence[Callable[..., object]] = (bash, view, edit, search_symbol, finish)


def ran(command: str) -> Message:
    return calling(("bash", {"command": command}))


def tried(path: str = "a.py", old: str = "wrong") -> Message:
    return calling(("edit", {"path": path, "old": old, "new": "x"}))


def sought(name: str) -> Message:
    return calling(("search_symbol", {"name": name}))


BROKEN = '<tool_call>\n{"name": "view", "arguments": {"path": \n</tool_call>'
LAST = "That is all."


async def run(
    renderer: Renderer,
    *replies: Reply,
    rules: object = "on",
    turns: int = 100,
    context: int = 100_000,
    tools: Sequence[Callable[..., object]] = TOOLS,
    watch: agent.Watch = lambda _: None,
) -> Trajectory:
    policy = TokenPolicy(ScriptedSession(play(*replies, LAST), renderer), renderer, Sampling(max_tokens=1000), context)
    trajectory = Trajectory("t", 0)
    made = hints.make(config.Hints(rules=rules), turns, context, renderer)  # type: ignore[arg-type]
    await agent.run(policy, [*_prompt()], Toolbox(tools), Limits(turns, 60.0), trajectory, watch, made)
    return trajectory


def _prompt() -> Iterator[Message]:
    yield Message("user", "Begin.")


def fired(trajectory: Trajectory) -> list[tuple[int, str]]:
    assert trajectory.hints is not None
    return [(hint.turn, hint.rule) for hint in trajectory.hints]


# Each rule, at its threshold


@pytest.mark.parametrize(
    ("rule", "replies"),
    [
        ("unreadable", [ran("a"), BROKEN]),
        ("unknown", [ran("a"), calling(("grep", {"pattern": "x"}))]),
        ("unknown", [ran("a"), calling(("view", {"file": "x"}))]),
        ("repeat", [ran("a"), ran("a")]),
        ("cycle", [ran("a"), ran("b"), ran("a"), ran("b")]),
        ("edits", [tried(), ran("a"), tried(old="wrong")]),
        ("empty", [sought("nothing 1"), ran("make"), ran("grep nothing .")]),
        ("reading", [ran("grep a ."), calling(("view", {"path": "x"})), ran("cd src && sed -n 1,9p y | head")]),
        ("reading", [ran("make"), calling(*[("view", {"path": path}) for path in "abc"])]),
    ],
)
async def test_a_rule_speaks_at_its_threshold_and_not_before(renderer: Renderer, rule: str, replies: list[Reply]) -> None:
    for count in range(len(replies)):
        assert fired(await run(renderer, *replies[:count])) == []
    assert fired(await run(renderer, *replies)) == [(len(replies) - 1, rule)]


@pytest.mark.parametrize(
    "replies",
    [
        [ran("a"), ran("b"), ran("a")],
        [ran("a"), ran("b"), ran("a"), ran("c")],
        [tried("a.py"), tried("b.py")],
        [tried(), tried(old="right"), tried()],
        [sought("nothing"), sought("x"), sought("nothing")],
        [ran("grep a ."), sought("x"), ran("grep b ."), ran("grep c .")],
        [ran("cat a"), ran("cat b"), ran("make | tail -3"), ran("cat c")],
        [ran("cat a > b"), ran("cat c > d"), ran("sed -i s/a/b/ e"), ran("cat f >> g")],
    ],
)
async def test_what_only_looks_like_it_is_left_alone(renderer: Renderer, replies: list[Reply]) -> None:
    assert fired(await run(renderer, *replies)) == []


async def test_no_edit_after_most_of_the_turns(renderer: Renderer) -> None:
    looks = [ran(f"step {n}") for n in range(20)]
    assert fired(await run(renderer, *looks, turns=20, rules=["no_edit"])) == [(11, "no_edit"), (14, "no_edit")]
    for change in (tried(old="right"), ran("sed -i s/a/b/ c.py"), ran("echo a > b"), ran("git apply x.patch")):
        assert fired(await run(renderer, change, *looks[1:], turns=20, rules=["no_edit"])) == []
    for none in (ran("make 2>&1 >/dev/null"), ran("test 3 -gt 2"), tried(), ran("python -c 'print(a->b)'")):
        assert len(fired(await run(renderer, none, *looks[1:], turns=20, rules=["no_edit"]))) == 2
    assert fired(await run(renderer, *looks, turns=20, tools=[bash, view], rules=["no_edit"])) == []


async def test_few_turns_are_left(renderer: Renderer) -> None:
    steps = [ran(f"step {n}") for n in range(10)]
    trajectory = await run(renderer, *steps, turns=10, rules=["ending"])
    assert fired(trajectory) == [(6, "ending")]
    assert "3 turns are left" in trajectory.turns[6].results[-1].text
    assert fired(await run(renderer, *steps, turns=6, rules=["ending"])) == []


async def test_few_tokens_are_left(renderer: Renderer) -> None:
    steps = [ran(f"step {n} " + "word " * 30) for n in range(30)]
    trajectory = await run(renderer, *steps, context=6000, rules=["ending"])
    [(turn, rule)] = fired(trajectory)
    ends = [turn.span[1] for turn in trajectory.turns]
    assert rule == "ending"
    assert ends[turn - 1] < 0.85 * 6000 <= ends[turn]
    assert trajectory.stop == "context"


async def test_without_a_symbol_search_nobody_is_sent_there(renderer: Renderer) -> None:
    greps = [ran(f"grep {n} .") for n in range(6)]
    assert fired(await run(renderer, *greps, tools=[bash, view, edit])) == []


# What they say


async def test_the_same_call_is_hinted_at_twice_and_then_ends_the_run(renderer: Renderer) -> None:
    trajectory = await run(renderer, ran("x"), *[ran("same")] * 9)
    assert (trajectory.stop, len(trajectory.turns)) == ("stuck", 5)
    assert fired(trajectory) == [(2, "repeat"), (3, "repeat")]
    assert trajectory.hints is not None
    assert trajectory.hints[0].text != trajectory.hints[1].text


async def test_stuck_is_part_of_its_rule(renderer: Renderer) -> None:
    trajectory = await run(renderer, *[ran("same")] * 9, rules=["reading"])
    assert (trajectory.stop, len(trajectory.turns)) == ("answer", 10)


async def test_the_same_call_with_another_result_is_no_repeat(renderer: Renderer) -> None:
    results = iter(range(10))

    def bash(command: str) -> str:
        """Run."""
        return f"{next(results)} tests fail"

    assert fired(await run(renderer, *[ran("make test")] * 6, tools=[bash, edit])) == []


@pytest.mark.parametrize(("family", "markers"), [("hermes", "smollm2"), ("qwen3", "qwen3"), ("llama3", "llama3")])
async def test_a_broken_call_is_shown_in_the_familys_own_format(make_folder: MakeFolder, family: str, markers: str) -> None:
    renderer = load(make_folder(markers), family)
    whole = renderer.reply(tried())
    trajectory = await run(renderer, whole[:-9] + whole[-3:])  # its JSON is not closed
    assert fired(trajectory) == [(0, "unreadable")]
    shown = trajectory.turns[0].results[-1].text.rpartition("Hint: ")[2]
    assert "edit(path: string, old: string, new: string)" in shown
    example = shown.partition("\n")[2]
    [call] = renderer.parse(renderer.reply(calling(("edit", {"path": "…", "old": "…", "new": "…"})))).calls
    assert f'"name": "{call.name}"' in example
    assert ("<tool_call>" in example) == (family != "llama3")
    assert "<|" not in example, "stop markers are no part of a call"


async def test_nearest_names(renderer: Renderer) -> None:
    async def said(name: str, **arguments: object) -> str:
        trajectory = await run(renderer, calling((name, arguments)))
        return trajectory.turns[0].results[-1].text.rpartition("Hint: ")[2]

    assert await said("str_replace") == "There is no tool 'str_replace': use edit(path: string, old: string, new: string)."
    assert await said("search_symbols") == "There is no tool 'search_symbols': use search_symbol(name: string)."
    assert await said("qqq") == "There is no tool 'qqq': the tools are bash, view, edit, search_symbol, finish."
    assert await said("edit", path="a", old_str="b", new="c") == (
        "edit has no argument 'old_str'; you may mean 'old'. It is called as edit(path: string, old: string, new: string)."
    )


async def test_failed_edits_show_the_lines_that_are_there(renderer: Renderer) -> None:
    trajectory = await run(renderer, tried(), tried(old="wrong"), tools=[edit, bash])
    # the same call with the same result is also a repeat, which comes first
    assert fired(trajectory) == [(1, "repeat")]
    trajectory = await run(renderer, tried(), ran("x"), tried())
    assert trajectory.turns[2].results[-1].text.endswith("These lines are in it now:\n     7\tright\n     8\tas well")


async def test_no_hint_is_longer_than_its_budget(renderer: Renderer) -> None:
    def edit(path: str, old: str, new: str) -> str:
        """Change."""
        raise ToolError("old is not in it. These lines are nearest:\n" + "\n".join(f"{n:>6}\t{'wörd ' * 40}" for n in range(20)))

    trajectory = await run(renderer, tried(), ran("x"), tried(), tools=[edit, bash])
    assert trajectory.hints is not None
    [hint] = trajectory.hints
    count = hints.make(config.Hints(rules="on"), 9, 9, renderer).count  # type: ignore[union-attr]
    assert TOKENS - 2 <= count(hint.text) <= TOKENS
    assert hint.text.endswith("…")


# Budgets


async def test_two_hints_a_rule_three_turns_apart(renderer: Renderer) -> None:
    greps = [ran(f"grep {n} .") for n in range(20)]
    assert fired(await run(renderer, *greps)) == [(2, "reading"), (5, "reading")]


async def test_different_rules_keep_the_distance_too(renderer: Renderer) -> None:
    assert fired(await run(renderer, BROKEN, calling(("nosuch", {})), ran("a"), calling(("nosuch", {})))) == [
        (0, "unreadable"),
        (3, "unknown"),
    ]


async def test_eight_hints_an_episode(renderer: Renderer) -> None:
    far = [ran(f"far {n}") for n in range(200)]
    gap = iter(range(0, 200, APART))

    def apart() -> list[Message]:
        start = next(gap)
        return far[start : start + APART]

    replies: list[Reply] = []
    for number in (1, 2):
        replies += [
            BROKEN,
            *apart(),
            calling(("nosuch", {"n": number})),
            *apart(),
            ran(f"s{number}"),
            ran(f"s{number}"),
            *apart(),
        ]
        replies += [tried(f"{number}.py"), ran(f"between {number}"), tried(f"{number}.py"), *apart()]
        replies += [sought(f"nothing {number}"), sought(f"nothing {number}{number}"), *apart()]
    trajectory = await run(renderer, *replies)
    assert len(fired(trajectory)) == PER_EPISODE == 8
    assert [rule for _, rule in fired(trajectory)] == [*["unreadable", "unknown", "repeat", "edits", "empty"] * 2][:8]


async def test_after_the_last_turn_nothing_is_said(renderer: Renderer) -> None:
    assert fired(await run(renderer, ran("a"), ran("a"), turns=2)) == []


# Finish without a change


async def test_an_empty_finish_is_asked_about_once(renderer: Renderer) -> None:
    empty = calling(("finish", {"answer": "done", "changed": False}))
    trajectory = await run(renderer, ran("a"), empty, empty)
    assert (trajectory.stop, trajectory.answer, len(trajectory.turns)) == ("finish", "done", 3)
    assert fired(trajectory) == [(1, "no_change")]
    [result] = trajectory.turns[1].results
    assert (result.role, result.name) == ("tool", "finish")
    assert "changed nothing" in result.text


async def test_calls_behind_such_a_finish_run(renderer: Renderer) -> None:
    reply = calling(("finish", {"answer": "done", "changed": False}), ("bash", {"command": "make"}))
    trajectory = await run(renderer, reply)
    assert [result.name for result in trajectory.turns[0].results] == ["finish", "bash"]


@pytest.mark.parametrize("changed", [True, None])
async def test_other_finishes_end_the_run(renderer: Renderer, changed: bool | None) -> None:
    trajectory = await run(renderer, calling(("finish", {"answer": "done", "changed": changed})))
    assert (trajectory.stop, fired(trajectory)) == ("finish", [])


async def test_with_real_tools_on_a_real_repository(renderer: Renderer, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    sandbox = LocalSandbox(folder)
    workspace = Workspace(sandbox, str(folder))
    await workspace.shell.bash(
        "git init -q; echo 'a = 1' > a.py; git add .; git -c user.name=a -c user.email=a@b commit -qm base"
    )
    workspace = await Workspace.open(sandbox, str(folder))
    trajectory = await run(
        renderer,
        calling(("finish", {})),
        calling(("edit", {"path": "a.py", "old": "a=1", "new": "a = 2"})),
        calling(("view", {"path": "a.py"})),
        calling(("edit", {"path": "a.py", "old": "a= 1", "new": "a = 2"})),
        calling(("edit", {"path": "a.py", "old": "a = 1", "new": "a = 2"})),
        calling(("finish", {})),
        tools=workspace.tools(),
    )
    assert trajectory.stop == "finish"
    assert fired(trajectory) == [(0, "no_change"), (3, "edits")]
    assert trajectory.turns[3].results[-1].text.endswith("These lines are in it now:\n     1\ta = 1")
    assert [hint.heeded for hint in trajectory.hints or ()] == [False, True]
    assert (folder / "a.py").read_text() == "a = 2\n"


# Where they stand


async def test_a_hint_is_read_and_never_trained_on(renderer: Renderer) -> None:
    seen: list[str] = []
    trajectory = await run(renderer, ran("a"), ran("a"), ran("b"), watch=lambda message: seen.append(message.text))
    assert trajectory.hints is not None
    [hint] = trajectory.hints
    assert trajectory.turns[1].results[-1].text == f"did a\n[exit code 0]\n\nHint: {hint.text}"
    assert hint.text in seen
    [segment] = trajectory.segments
    read = renderer.decode([token for token, wrote in zip(segment.tokens, segment.mask, strict=True) if not wrote])
    wrote = renderer.decode([token for token, wrote in zip(segment.tokens, segment.mask, strict=True) if wrote])
    assert hint.text in read
    assert hint.text not in wrote
    assert sum(segment.mask) == sum(end - start for start, end in (turn.span for turn in trajectory.turns))


def test_rules_cannot_see_a_tasks_solution() -> None:
    for file in (ROOT / "palestra" / "hints").glob("*.py"):
        nodes = ast.walk(ast.parse(file.read_text()))
        imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        assert not imported & {"palestra.task", "palestra.taskset", "palestra.rollout"}


# What became of them


@pytest.mark.parametrize(
    ("before", "then", "heeded"),
    [
        ([BROKEN], ran("a"), True),
        ([BROKEN], BROKEN, False),
        ([calling(("nosuch", {}))], ran("a"), True),
        ([calling(("nosuch", {}))], calling(("nosuch", {"a": 1})), False),
        ([ran("a"), ran("a")], ran("b"), True),
        ([ran("a"), ran("a")], ran("a"), False),
        ([ran("a"), ran("b"), ran("a"), ran("b")], ran("c"), True),
        ([ran("a"), ran("b"), ran("a"), ran("b")], ran("a"), False),
        ([tried(), ran("a"), tried()], calling(("view", {"path": "a.py"})), True),
        ([tried(), ran("a"), tried()], tried(old="right"), True),
        ([tried(), ran("a"), tried()], tried("b.py", "right"), False),
        ([sought("nothing 1"), sought("nothing 2")], sought("x"), True),
        ([sought("nothing 1"), sought("nothing 2")], sought("nothing 3"), False),
        ([ran("grep 1 ."), ran("grep 2 ."), ran("grep 3 .")], sought("x"), True),
        ([ran("grep 1 ."), ran("grep 2 ."), ran("grep 3 .")], ran("grep 4 ."), False),
        ([calling(("finish", {"answer": "", "changed": False}))], tried(old="right"), True),
        ([calling(("finish", {"answer": "", "changed": False}))], ran("ls"), False),
    ],
)
async def test_whether_it_was_heeded_is_noted(renderer: Renderer, before: list[Reply], then: Reply, heeded: bool) -> None:
    trajectory = await run(renderer, *before, then)
    assert trajectory.hints is not None
    assert trajectory.hints[0].turn == len(before) - 1
    assert trajectory.hints[0].heeded is heeded


async def test_a_hint_that_nobody_could_heed_is_neither(renderer: Renderer) -> None:
    context = len(renderer.prompt([*_prompt()], Toolbox(TOOLS).schemas())) + 150
    trajectory = await run(renderer, ran("a"), ran("a"), ran("b"), context=context, rules=["repeat"])
    assert trajectory.stop == "context"
    assert [hint.heeded for hint in trajectory.hints or ()] == [None]


# The switch


def _collector(renderer: Renderer, ledger: Ledger, folder: Path, settings: config.Hints | None, seed: int = 0) -> Collector:
    made = None if settings is None else hints.make(settings, 4, 100_000, renderer)
    policies = TokenPolicies(Dice(renderer), renderer)
    return Collector(policies, lambda: Bounded(4), ledger, Limits(4, 60.0), 100_000, seed, folder / "cache", hints=made)


async def _trained(renderer: Renderer, folder: Path, settings: config.Hints | None) -> dict[tuple[str, int], Trajectory]:
    folder.mkdir()  # noqa: ASYNC240
    tasks = [Probe(f"task-{number}") for number in range(12)]
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        collector = _collector(renderer, ledger, folder, settings)
        async with collector.groups(enumerate([tasks]), 3, Pace(1000, 1), Sampling()) as stream:
            groups = [group async for group in stream]
    found = [attempt.trajectory for group in groups for attempt in group.rollouts]
    return {(trajectory.task_id, trajectory.index): trajectory for trajectory in found}


def _bytes(trajectories: dict[tuple[str, int], Trajectory]) -> dict[tuple[str, int], object]:
    return {key: [pack_segment(segment) for segment in t.segments] for key, t in sorted(trajectories.items())}


async def test_off_means_byte_for_byte_as_without(renderer: Renderer, tmp_path: Path) -> None:
    without = await _trained(renderer, tmp_path / "without", None)
    for name, settings in {"off": config.Hints(), "no group": config.Hints(rules="on", share=0)}.items():
        off = await _trained(renderer, tmp_path / name, settings)
        assert _bytes(off) == _bytes(without)
        assert all(trajectory.hints is None for trajectory in off.values())
    quiet = await _trained(renderer, tmp_path / "quiet", config.Hints(rules="on"))  # there is nothing to remark on
    assert _bytes(quiet) == _bytes(without)
    assert all(trajectory.hints == [] for trajectory in quiet.values())


async def test_the_same_script_with_and_without(renderer: Renderer) -> None:
    replies = [ran("a"), ran("a"), BROKEN, ran("grep nothing"), ran("b")]
    off, without = await run(renderer, *replies, rules="off"), Trajectory("t", 0)
    policy = TokenPolicy(ScriptedSession(play(*replies, LAST), renderer), renderer, Sampling(max_tokens=1000), 100_000)
    await agent.run(policy, [*_prompt()], Toolbox(TOOLS), Limits(100, 60.0), without)
    off.spans = without.spans = []
    assert pack(off) == pack(without)
    assert [pack_segment(s) for s in off.segments] == [pack_segment(s) for s in without.segments]
    on = await run(renderer, *replies)
    assert [pack_segment(s) for s in on.segments] != [pack_segment(s) for s in without.segments]


async def test_a_share_of_the_groups_is_decided_by_the_seed(renderer: Renderer, tmp_path: Path) -> None:
    first, again = [await _trained(renderer, tmp_path / name, config.Hints(rules="on", share=0.5)) for name in ("1", "2")]
    hinted = {key for key, trajectory in first.items() if trajectory.hints is not None}
    assert hinted == {key for key, trajectory in again.items() if trajectory.hints is not None}
    groups = {task for task, _ in hinted}
    assert 0 < len(groups) < 12
    assert hinted == {(task, index) for task in groups for index in range(3)}, "a group is of one kind"


def test_shares_are_shares(renderer: Renderer, tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        for share in (0.0, 0.25, 1.0):
            collector = _collector(renderer, ledger, tmp_path, config.Hints(rules="on", share=share))
            keys = [Key("train", step, f"task-{n}", 0) for step in range(20) for n in range(100)]
            got = sum(collector.hints_for(key) is not None for key in keys) / len(keys)
            assert got == pytest.approx(share, abs=0.03)


def test_evaluations_have_none_unless_asked(renderer: Renderer, tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        for asked in (False, True):
            collector = _collector(renderer, ledger, tmp_path, config.Hints(rules="on", evaluation=asked))
            for phase in ("eval", "greedy"):
                assert (collector.hints_for(Key(phase, 0, "t", 0)) is not None) == asked  # type: ignore[arg-type]
            assert collector.hints_for(Key("train", 0, "t", 0)) is not None


async def test_a_chosen_set(renderer: Renderer) -> None:
    replies = [BROKEN, ran("x"), ran("y"), ran("z"), ran("a"), ran("a")]
    assert fired(await run(renderer, *replies, rules=["repeat"])) == [(5, "repeat")]
    assert fired(await run(renderer, *replies, rules=["unreadable"])) == [(0, "unreadable")]


def test_the_config_knows_every_rule() -> None:
    names = [rule.name for rule in RULES]
    assert config.Hints(rules=names).rules == tuple(names)  # type: ignore[arg-type]
    base = {"run": {"folder": "r"}, "tasks": {"heldout": "m:o"}}
    for wrong, complaint in (
        (["repeats"], "hints.rules: there is no rule 'repeats'; did you mean 'repeat'?"),
        ("some", "hints.rules: 'some' is neither 'on' nor 'off'; give a list for single rules"),
        (3, "hints.rules: there is no rule 3"),
    ):
        with pytest.raises(ConfigError, match=r"hints\.rules") as caught:
            config.parse(base | {"hints": {"rules": wrong}})
        assert complaint in str(caught.value)
    whole = config.parse(base | {"hints": {"rules": ["repeat", "cycle"], "share": 0.5}})
    assert config.parse(tomllib.loads(config.dump(whole))) == whole
