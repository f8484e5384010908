"""Bugs and questions in real sandboxes: proven, solved by an agent that uses the tools, and read back from the ledger."""

from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from playing import calling, play
from swe.factory.conftest import needs_bwrap

from palestra.agent import Limits
from palestra.backends.scripted import ScriptedSampler
from palestra.checking import check
from palestra.collect import Collector
from palestra.dispatch.bounded import Bounded
from palestra.ledger import Ledger
from palestra.message import JSON, ToolCall, from_json
from palestra.policy import TokenPolicies
from palestra.protocols import Renderer, Sampling
from palestra.swe.factory import localise
from palestra.swe.factory.edit import apply
from palestra.swe.factory.localise import Definition, Fault
from palestra.swe.factory.packages import python_files
from palestra.swe.factory.recipe import Recipe, read, write
from palestra.swe.factory.small import easy
from palestra.swe.factory.task import BugFix
from palestra.tool import Finish, Toolbox
from palestra.trajectory import Trajectory


def test_the_set_is_large_varied_and_without_doubles(recipes: list[Recipe]) -> None:
    assert len(recipes) >= 500
    assert len({each.package for each in recipes}) >= 7
    assert len({each.kind for each in recipes}) == 10
    assert len({each.id for each in recipes}) == len({(each.package, each.edit) for each in recipes}) == len(recipes)
    assert max(Counter((each.package, each.edit.path, each.symbol) for each in recipes).values()) <= 3
    for each in recipes:
        assert each.fails
        assert not set(each.fails) & set(each.passes)
        assert set(each.canaries) <= {*each.fails, *each.passes}
        assert {edit.path for edit in each.twists} <= set(each.hidden)
        assert each.edit.path not in each.hidden


def test_no_statement_tells_the_change(recipes: list[Recipe]) -> None:
    for each in recipes:
        if len(each.edit.old) > 12 and "\n" not in each.edit.old:
            files = python_files(each.package)
            tests = b"".join(files[path] for path in each.hidden if path in files).decode()
            assert each.edit.old not in each.statement or each.edit.old in tests


def test_a_set_is_written_and_read_to_the_byte(tmp_path: Path, recipes: list[Recipe]) -> None:
    write(tmp_path / "a.gz", recipes, {"seed": 0})
    assert read(tmp_path / "a.gz") == recipes
    write(tmp_path / "b.gz", recipes, {"seed": 0})
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


@needs_bwrap
@pytest.mark.usefixtures("provider")
async def test_gold_scores_one_and_doing_nothing_zero(tmp_path: Path, recipes: list[Recipe]) -> None:
    first = {each.package: each for each in recipes}
    bugs: list[BugFix | Fault | Definition] = [BugFix(each.id, each) for each in first.values()]
    bugs += localise.faults(first.values()) + localise.definitions(["toolz"], search=False)[:2]
    found = await check(bugs, tmp_path, lambda _: None)
    assert found["failures"] == {}
    assert found["gold"] == found["noop"] == len(bugs)


@needs_bwrap
@pytest.mark.usefixtures("provider")
async def test_an_agent_that_uses_the_tools_mends_a_bug(tmp_path: Path, bug: BugFix, renderer: Renderer) -> None:
    """It reproduces, searches, views, edits, checks and finishes; all of it can be read in the ledger."""
    recipe = bug.recipe
    files = python_files(recipe.package)
    before = files[recipe.edit.path][: recipe.edit.start].decode()
    line = before.count("\n") + 1
    broken = apply([recipe.edit], files)[recipe.edit.path].decode().splitlines()
    right = files[recipe.edit.path].decode().splitlines()
    low, high = max(0, line - 4), line + 3 + recipe.edit.new.count("\n")
    more = len(right) - len(broken)
    script = play(
        calling(("bash", {"command": "git status --short && ls"})),
        calling(("search_symbol", {"name": recipe.symbol})),
        calling(("view", {"path": recipe.edit.path, "start": low + 1, "end": high})),
        calling(
            ("edit", {"path": recipe.edit.path, "old": "\n".join(broken[low:high]), "new": "\n".join(right[low : high + more])})
        ),
        calling(("bash", {"command": "git diff --stat && python3 -c 'import toolz; print(toolz.__version__)'"})),
        calling(("finish", {"answer": "The change is taken back."})),
    )
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        limits = Limits(8, 120.0, remind=2, context=100_000)
        collector = Collector(
            TokenPolicies(ScriptedSampler(script, renderer), renderer), lambda: Bounded(1), ledger, limits, 100_000, 0, tmp_path
        )
        async with collector.trajectories([bug], 1, "eval", 0, Sampling(max_tokens=4000, stop_ids=renderer.stop_ids)) as stream:
            async for trajectory in stream:
                assert trajectory.failure is None
        [kept] = ledger.finished("eval", 0).values()
    assert (kept.reward, kept.stop, kept.answer) == (1.0, "finish", "The change is taken back.")
    assert kept.artifact.startswith(f"diff --git a/{recipe.edit.path}")
    said = [message.text for message in kept.messages]
    assert recipe.statement in said
    assert any(f"{recipe.edit.path}:" in text and recipe.symbol in text for text in said)
    assert any("6 of 8 turns and about" in text for text in said)
    assert [call.name for turn in kept.turns for call in turn.message.calls].count("search_symbol") == 1


@needs_bwrap
@pytest.mark.usefixtures("provider")
@pytest.mark.parametrize("search", [True, False])
async def test_worked_examples_show_what_the_tools_really_say(search: bool) -> None:
    task = localise.definitions(["boltons"], search=search)[0]
    await task.prepare(Path())
    async with AsyncExitStack() as stack:
        scene = await task.setup(stack)
        messages = task.prompt(scene)
        tools = Toolbox(task.tools(scene))
        [call] = messages[2].calls
        found = await tools.run(call)
        path = localise.EXAMPLES[0][3]
        assert isinstance(found, str)
        assert messages[3].text.startswith((f"1 definition of 'chunked': {path}", f"./{path}:"))
        assert messages[3].text in found
        assert await tools.run(ToolCall("", "finish", {"path": path})) == Finish({"path": path})


@pytest.mark.parametrize(
    ("given", "reward"),
    [
        ({"path": "toolz/itertoolz.py"}, 1.0),
        ({"path": "./toolz/itertoolz.py "}, 1.0),
        ({"path": "/work/repo/toolz/itertoolz.py"}, 1.0),
        ({"path": "itertoolz.py"}, 0.0),
        ({"path": None}, 0.0),
        ("toolz/itertoolz.py", 0.0),
        (None, 0.0),
    ],
)
async def test_the_file_is_right_or_not(given: object, reward: float) -> None:
    task = Definition("t", "toolz", "function", "first", "toolz/itertoolz.py")
    trajectory = Trajectory("t", 0, stop="finish")
    async with AsyncExitStack() as stack:
        assert await task.score(given, trajectory, stack) == reward
        assert await task.score(given, Trajectory("t", 0, stop="turns"), stack) == 0.0


async def test_the_function_at_fault_by_any_end_of_its_name(recipes: list[Recipe]) -> None:
    recipe = next(each for each in recipes if "." in each.symbol)
    task, path, last = Fault("f", recipe), recipe.edit.path, recipe.symbol.rpartition(".")[2]
    async with AsyncExitStack() as stack:
        for symbol, reward in ((recipe.symbol, 1.0), (last, 1.0), (f"`{last}()`", 1.0), (last[1:], 0.0), ("", 0.0)):
            score = await task.score({"path": path, "symbol": symbol}, Trajectory("f", 0, stop="finish"), stack)
            assert (score.reward, score.metrics) == (reward, {"path": 1.0})


def test_easy_bugs_come_with_examples_that_are_not_among_them(recipes: list[Recipe]) -> None:
    tasks = easy(recipes, True, recipes, shown=2)
    assert len(tasks) >= 50
    shown = tasks[0].examples
    assert not {each.recipe for each in tasks} & set(shown)
    messages = tasks[0].prompt(None)
    calls = [call for message in messages for call in message.calls]
    assert [call.name for call in calls] == ["search_symbol", "edit"] * 2
    for example, call in zip(shown, calls[1::2], strict=True):
        assert mends(example, call.arguments)
    assert f"at fault is {tasks[0].recipe.symbol} in {tasks[0].recipe.edit.path}" in messages[-1].text
    assert shown[0].edit.path in messages[3].text


def test_a_demonstration_mends_its_bug_without_examples(recipes: list[Recipe]) -> None:
    for task in easy(recipes, True, recipes, shown=0):
        line = task.demonstration()
        told, asked, look, seen, change = (from_json(message) for message in line["messages"])
        assert (told.role, asked.role, look.calls[0].name, seen.role) == ("system", "user", "search_symbol", "tool")
        assert mends(task.recipe, change.calls[0].arguments)
        assert [tool["function"]["name"] for tool in line["tools"]] == ["search_symbol", "edit"]


def mends(recipe: Recipe, edit: Mapping[str, JSON]) -> bool:
    """Whether the edit fits in one place of the broken file, and makes it what it was."""
    files, path = python_files(recipe.package), recipe.edit.path
    broken = apply([recipe.edit], files)[path].decode()
    return broken.count(str(edit["old"])) == 1 and broken.replace(str(edit["old"]), str(edit["new"])).encode() == files[path]
