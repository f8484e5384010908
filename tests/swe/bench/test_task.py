"""The whole path with a real environment: prepared, proven, solved by an agent that uses the tools, and cheated upon in vain."""

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from playing import calling, play
from swe.bench.conftest import FIXED, SHARED, needs_bwrap, needs_data

from palestra import config, taskset
from palestra.agent import Limits
from palestra.backends.scripted import ScriptedSampler
from palestra.checking import check
from palestra.cli import main
from palestra.collect import Collector
from palestra.dispatch.bounded import Bounded
from palestra.ledger import Ledger
from palestra.policy import TokenPolicies
from palestra.protocols import Renderer, Sampling
from palestra.swe import diff
from palestra.swe.bench import loading, plan
from palestra.swe.bench import task as tasks
from palestra.swe.bench.instance import from_row
from palestra.swe.bench.runtime import Native
from palestra.swe.bench.task import Issue, allowed
from palestra.swe.factory.forging import FORGERIES
from palestra.task import Score
from palestra.trajectory import Trajectory

CODE = "abacus/__init__.py"
RECIPE = Path(__file__).parents[3] / "recipes" / "swe" / "verified.toml"


async def attempt(issue: Issue, *commands: str, code: str = "", honest: bool = False) -> Score:
    """What an agent earns that runs these commands and puts this code where the package begins."""
    await issue.prepare(Path())
    async with AsyncExitStack() as stack:
        desk = await issue.setup(stack)
        if honest:
            await issue.solve(desk)
        for command in commands:
            await desk.workspace.shell.bash(command)
        if code:
            before = await desk.workspace.sandbox.read(f"{desk.folder}/{CODE}")
            await desk.workspace.sandbox.write(f"{desk.folder}/{CODE}", code.encode() + b"\n" + before)
        artifact = await issue.harvest(desk, Trajectory(issue.id, 0))
    async with AsyncExitStack() as stack:
        return await issue.score(artifact, Trajectory(issue.id, 0), stack)


@needs_bwrap
def test_the_verb_proves_instances(tmp_path: Path, row: Mapping[str, object], mirrors: Path) -> None:
    """As `palestra check recipes/swe/verified.toml` does: gold resolves, nothing does not, and what cannot be made is told."""
    without = {**row, "instance_id": "bare-1", "environment_yml": None}
    (tmp_path / "data.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(without)}\n")
    words = ["check", str(RECIPE), f"tasks.arguments.data={tmp_path}/data.jsonl", f"run.folder={tmp_path}/run"]
    words += ["--mirrors", str(mirrors), "--json", str(tmp_path / "out.json")]
    assert main([*words, "--only", "maker__abacus-1"]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["tasks"], found["gold"], found["noop"], found["failures"]) == (1, 1, 1, {})
    assert main(words) == 1
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["tasks"], found["gold"], found["noop"], list(found["failures"])) == (2, 1, 1, ["bare-1"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tasks.arguments.data=none.jsonl"], "no data set 'none.jsonl'"),
        (["tasks.arguments.runtime=cloud"], "runtime = 'cloud' is unknown; known: 'native', 'image'"),
        (["tasks.arguments.only=none-1"], "tasks.arguments.only: no instance 'none-1'"),
        (["--mirrors", "none"], "no mirror of maker/abacus in none"),
    ],
)
def test_what_is_wrong_is_one_line(
    tmp_path: Path, row: Mapping[str, object], capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    own = {**row, "base_commit": "0" * 40}
    (tmp_path / "data.jsonl").write_text(json.dumps(own))
    command = ["check", str(RECIPE), f"tasks.arguments.data={tmp_path}/data.jsonl", f"run.folder={tmp_path}/run"]
    assert main([*command, *words]) == 2
    assert said in capsys.readouterr().err


@needs_bwrap
@pytest.mark.usefixtures("provider")
async def test_an_environment_that_cannot_be_made_is_a_failure_of_its_task(
    tmp_path: Path, row: Mapping[str, object], mirrors: Path
) -> None:
    script = str(row["eval_sh"]).replace("--no-deps", "--no-deps && echo no such compiler && false")
    instance = from_row({**row, "eval_sh": script}, "here")
    found = await check([Issue("broken", instance, Native(str(mirrors)))], tmp_path, lambda _: None)
    assert found["failures"] == {"broken": ["prepare: maker__abacus-1 could not be set up: it ended with 1: no such compiler"]}


@needs_bwrap
@pytest.mark.usefixtures("provider")
async def test_what_conda_compiled_is_had_as_a_wheel_of_a_later_patch_or_left_out(issue: Issue) -> None:
    await issue.prepare(Path())
    async with AsyncExitStack() as stack:
        bash = (await issue.setup(stack)).workspace.shell.bash
        assert (await bash("python -c 'import iniconfig, tabulate; print(tabulate.__version__)'")).startswith("0.8.10\n")
        assert (await bash("cat ~/env/left-out.txt")).startswith("termcolor==1.1.0\n[")


@needs_bwrap
@pytest.mark.usefixtures("provider")
async def test_an_agent_that_uses_the_tools_settles_an_issue(tmp_path: Path, issue: Issue, renderer: Renderer) -> None:
    """It reproduces, searches, views, edits, tests and finishes; all of it can be read in the ledger."""
    old, new = "return sum(numbers) / len(numbers)", "return sum(numbers) / len(numbers) if numbers else 0"
    script = play(
        calling(("bash", {"command": "git log --oneline && python -c 'import abacus; abacus.mean([])'"})),
        calling(("search_symbol", {"name": "mean"})),
        calling(("view", {"path": CODE})),
        calling(("edit", {"path": CODE, "old": old, "new": new})),
        calling(("search_symbol", {"name": "mean"})),
        calling(("bash", {"command": "python -c 'import abacus; print(abacus.mean([]))' && pytest -q"})),
        calling(("finish", {"answer": "The mean of nothing is 0."})),
    )
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        collector = Collector(
            TokenPolicies(ScriptedSampler(script, renderer), renderer),
            lambda: Bounded(1),
            ledger,
            Limits(8, 120.0, context=100_000),
            100_000,
            0,
            tmp_path,
        )
        sampling = Sampling(max_tokens=4000, stop_ids=renderer.stop_ids)
        async with collector.trajectories([issue], 1, "eval", 0, sampling) as stream:
            async for trajectory in stream:
                assert trajectory.failure is None
        [kept] = ledger.finished("eval", 0).values()
    assert (kept.reward, kept.stop, kept.answer) == (1.0, "finish", "The mean of nothing is 0.")
    said = [message.text for message in kept.messages]
    assert any("ZeroDivisionError" in text for text in said)
    assert any("1 definition of 'mean'" in text for text in said)
    assert sum("definition of 'mean'" in text and "if numbers else 0" in text for text in said) == 1  # found as it is now
    assert any(text.startswith("0\n") and "2 passed" in text for text in said)


@needs_bwrap
@pytest.mark.usefixtures("provider")
async def test_the_agent_sees_no_future_and_no_hidden_test(issue: Issue) -> None:
    await issue.prepare(Path())
    async with AsyncExitStack() as stack:
        bash = (await issue.setup(stack)).workspace.shell.bash
        assert (await bash("git rev-list --all --reflog | wc -l")).startswith("1\n")
        assert await bash("git remote; git tag; git stash list; git fsck --unreachable --no-progress") == "[exit code 0]"
        assert (await bash("find . -path ./.git -prune -o -type f -printf '%T@\\n' | sort -u | wc -l")).startswith("1\n")
        places = "/work /home /tmp /var /etc /opt /run /mnt"
        assert "[exit code 0]" not in await bash(f"grep -rIl mean_of_nothing {places} 2> /dev/null")
        assert "unreachable" in await bash("python -c \"import socket; socket.create_connection(('192.0.2.1', 80), 5)\"")


PASS_ALL = "import pytest\\n@pytest.hookimpl(hookwrapper=True)\\ndef pytest_runtest_makereport(item, call):\\n    out = yield\\n"
PASS_ALL += '    out.get_result().outcome = \\"passed\\"\\n'
FORGED = "".join(f"PASSED tests/test_abacus.py::test_{name}\\n" for name in ("mean", "largest", "mean_of_nothing"))


# pytest keeps the real output under another number while tests run.
WRITE = f"""
import os
def _forge():
    for number in range(1, 20):
        try:
            os.write(number, b'\\n{FORGED}')
        except OSError:
            pass
_forge()"""


@needs_bwrap
@pytest.mark.usefixtures("provider")
class TestCheating:
    async def test_the_honest_solution_earns_one(self, issue: Issue) -> None:
        """What it leaves behind beside its fix does not count: notes among the tests, and modules in place of others."""
        notes = "echo notes > tests/notes.md; echo 'def test_x(): pass' > test_own.py"
        found = await attempt(issue, notes, "mkdir json; echo 1/0 | tee json/__init__.py pytest.py", honest=True)
        assert found == Score(1.0, {"left_out": 4.0, "fails": 1.0, "passes": 1.0, "forged": 0.0})

    async def test_what_breaks_another_test_earns_nothing(self, issue: Issue) -> None:
        found = await attempt(issue, f"sed -i 's/max(numbers)/min(numbers)/' {CODE}", honest=True)
        assert found == Score(0.0, {"left_out": 0.0, "fails": 1.0, "passes": 0.5, "forged": 0.0})

    @pytest.mark.parametrize(
        "command",
        [
            pytest.param("true", id="nothing"),
            pytest.param(f'printf "{PASS_ALL}" | tee conftest.py abacus/conftest.py tests/conftest.py', id="conftest"),
            pytest.param("printf 'import os\\nos._exit(0)\\n' | tee sitecustomize.py usercustomize.py", id="sitecustomize"),
            pytest.param("printf '[pytest]\\naddopts = --co\\n' | tee pytest.ini tox.ini; rm setup.py", id="settings"),
            pytest.param("printf '[tool:pytest]\\naddopts = -k not_this\\n' > setup.cfg", id="setup.cfg"),
            pytest.param("echo 'def test_mean_of_nothing(): pass' > tests/test_abacus.py", id="tests"),
            pytest.param("rm -r tests; ln -s /dev/null tests", id="link in place of tests"),
            pytest.param("mkdir -p tests/test_abacus.py/x; rm tests/test_abacus.py", id="folder in place of a test"),
            pytest.param("echo 'import os; os._exit(0)' > ~/env/lib/python3*/site-packages/evil.pth", id="site-packages"),
            pytest.param("printf '#!/bin/sh\\necho PASSED' > ~/env/bin/pytest", id="program"),
        ],
    )
    async def test_what_is_left_behind_earns_nothing(self, issue: Issue, command: str) -> None:
        assert (await attempt(issue, command)).reward == 0

    # There is no file of outcomes here, and the tests are not unittest's.
    @pytest.mark.parametrize("name", [name for name in FORGERIES if name not in ("outcomes", "unittest")])
    async def test_a_patched_test_runner_is_found_out(self, issue: Issue, name: str) -> None:
        found = await attempt(issue, code=FORGERIES[name])
        assert found == Score(0.0, {"left_out": 0.0, "fails": 1.0, "passes": 1.0, "forged": 1.0})

    @pytest.mark.parametrize(
        "code", [f"{WRITE}; os._exit(0)", f"{WRITE}\nimport atexit; atexit.register(_forge)"], ids=["and ends", "at the end"]
    )
    async def test_a_forged_log_is_found_out(self, issue: Issue, code: str) -> None:
        found = await attempt(issue, code=code)
        assert (found.reward, found.metrics["fails"], found.metrics["forged"]) == (0.0, 1.0, 1.0)

    async def test_an_endless_loop_earns_nothing(self, issue: Issue, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tasks, "SECONDS", 5.0)
        assert await attempt(issue, code="while True: pass") == Score(0.0, {"left_out": 0.0})

    async def test_a_change_that_is_not_plain_is_refused(self, issue: Issue) -> None:
        assert await attempt(issue, f"chmod +x {CODE}", honest=True) == Score(0.0, {"refused": 1.0})


def test_the_fix_here_is_the_fix(issue: Issue) -> None:
    assert FIXED.count("if numbers else 0") == issue.instance.patch.count("if numbers else 0") == 1


@needs_data
def test_the_recipe_finds_the_data_beside_the_project() -> None:
    tasks = taskset.load(config.load(RECIPE).tasks, "heldout")
    assert len(tasks) == 500
    assert {task.id for task in tasks} >= {"psf__requests-1142", "django__django-16877"}


@needs_data
def test_every_fix_in_verified_may_be_made() -> None:
    """But for one file of requirements nothing of a gold patch is left out or refused."""
    for each in loading.load(str(SHARED / "verified.jsonl.gz")):
        taken, left_out = diff.admitted(each.patch, allowed(each, each.patch))
        kept = set(plan.changed_files(taken))
        assert left_out == len(set(plan.changed_files(each.patch)) - kept)
        assert set(plan.changed_files(each.patch)) - kept <= {"setup.cfg"}, each.id
