"""An issue to settle: the agent works on the repository as it was, and its diff is judged in a fresh sandbox by the tests that
came with the fix, which it never saw.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from palestra.errors import TaskError
from palestra.message import Message
from palestra.swe import agent, diff, grading
from palestra.swe.agent import Desk
from palestra.swe.bench import copies, plan
from palestra.swe.bench.instance import Instance
from palestra.swe.bench.runtime import Runtime
from palestra.swe.bench.verdict import Canary, Verdict, judge
from palestra.task import Score, Task
from palestra.trajectory import Trajectory

SECONDS = 1800.0
"""For the tests of one issue; the official limit."""
LARGEST_LOG = 64 * 2**20
TESTS = "Run Python with python; the repository is installed in its environment, so that changes take effect at once."

_LOADED_BY_NAME = ("conftest.py", "sitecustomize.py", "usercustomize.py", "setup.py")
_SETTINGS = ("pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", "noxfile.py")
_TESTS = ("test", "tests", "testing")


def allowed(instance: Instance, change: str) -> Callable[[str], bool]:
    """What of this diff counts: everything but tests, what runs them, settings, and new modules where Python looks first. One
    fix in SWE-bench Verified needs a setting: another package to be installed."""
    hidden = frozenset(plan.changed_files(instance.test_patch))
    new = frozenset(re.findall(r"^diff --git a/(\S+) b/\1\nnew file ", change, re.MULTILINE))

    def may_change(path: str) -> bool:
        *folders, name = path.split("/")
        if path in new and (not folders or (len(folders) == 1 and name == "__init__.py")) and name.endswith(".py"):
            return False
        if path in hidden or name in _LOADED_BY_NAME or name in _SETTINGS or name.endswith(".pth"):
            return False
        if name.startswith("test_") or name.endswith(("_test.py", "_tests.py")) or name in ("tests.py", "test.py"):
            return False
        return not any(folder in _TESTS for folder in folders)

    return may_change


@dataclass(frozen=True)
class Issue(Task[Desk, str]):
    instance: Instance
    runtime: Runtime
    search: bool = True

    async def prepare(self, cache: Path) -> None:
        snapshot = await self.runtime.snapshot(self.instance)
        if self.search:
            await copies.index(snapshot, self.runtime.folder)

    async def setup(self, stack: AsyncExitStack) -> Desk:
        snapshot, folder = await self.runtime.snapshot(self.instance), self.runtime.folder
        index = await copies.index(snapshot, folder) if self.search else None
        desk = await agent.sit_down_again(stack, snapshot, folder, index)
        await desk.workspace.shell.bash(f"export PATH={self.runtime.path}")
        return desk

    def prompt(self, env: Desk) -> Sequence[Message]:
        return agent.prompt(env, self.instance.problem, TESTS)

    def tools(self, env: Desk) -> Sequence[Callable[..., object]]:
        return env.tools()

    async def harvest(self, env: Desk, trajectory: Trajectory) -> str:
        return await env.diff()

    async def score(self, artifact: str, trajectory: Trajectory, stack: AsyncExitStack) -> Score:
        try:
            taken, left_out = diff.admitted(artifact, allowed(self.instance, artifact))
        except diff.Refused:
            return Score(0.0, {"refused": 1.0})
        verdict = await self._judged(taken, stack)
        if verdict is None:
            return Score(0.0, {"left_out": float(left_out)})
        metrics = {"left_out": float(left_out), "fails": verdict.fails, "passes": verdict.passes, "forged": float(verdict.forged)}
        return Score(1.0 if verdict.resolved else 0.0, metrics)

    async def solve(self, env: Desk) -> None:
        ran = await env.workspace.sandbox.run(
            ["git", "apply", "--whitespace=nowarn", "-"], folder=env.folder, stdin=self.instance.patch.encode()
        )
        if ran.code:
            raise TaskError(f"{self.id}: the gold patch does not apply: {ran.stderr.head.decode(errors='replace')[:300]}")

    async def _judged(self, taken: str, stack: AsyncExitStack) -> Verdict | None:
        """None where the change does not fit, or the tests take too long."""
        canary = Canary.beside(self.instance)
        after = {canary.path: canary.code.encode()} if canary else {}
        change = grading.Change(self.runtime.folder, taken, then=self.instance.test_patch, after=after)
        sandbox = await grading.fresh(stack, await self.runtime.snapshot(self.instance), change)
        if sandbox is None:
            return None
        script = self.runtime.test(self.instance)
        command = f"{script.test} {canary.directive}" if canary else script.test
        lines = [f"export PATH={self.runtime.path} PYTHONDONTWRITEBYTECODE=1", *script.exports, "exec 2>&1", command]
        ran = await sandbox.run(["bash", "-c", "\n".join(lines)], folder=self.runtime.folder, seconds=SECONDS, keep=LARGEST_LOG)
        if ran.timed_out:
            return None
        return await judge(self.instance, ran.stdout.head + ran.stdout.tail, canary)
