"""A bug to mend: the agent works on a broken package without the tests that noticed, and its diff is judged in a fresh sandbox by
just those, by others that passed all along, and by tests turned round that right code fails.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from palestra import sandboxes
from palestra.errors import ToolError
from palestra.message import Message
from palestra.protocols import Sandbox
from palestra.swe import agent, diff, grading
from palestra.swe.agent import Desk
from palestra.swe.factory.edit import Edit, apply
from palestra.swe.factory.packages import Package, find, python_files
from palestra.swe.factory.recipe import Recipe
from palestra.swe.factory.runtime import OPTIONS, REPOSITORY, SETTINGS, read_inside, snapshot
from palestra.task import Score, Task
from palestra.trajectory import Trajectory

SECONDS, PATIENCE = 60, 900.0
"""For the tests of one task, which take a few: of the processor, and by the clock, which on a busy machine says little."""
TESTS = "Run Python with python3, and tests that are here with python3 -m pytest."


@dataclass(frozen=True)
class BugFix(Task[Desk, str]):
    recipe: Recipe
    search: bool = True

    @property
    def package(self) -> Package:
        return find(self.recipe.package)

    async def prepare(self, cache: Path) -> None:
        await asyncio.to_thread(python_files, self.recipe.package)
        await snapshot(self.package)

    async def setup(self, stack: AsyncExitStack) -> Desk:
        sandbox = await broken(self.recipe, stack)
        return await agent.sit_down(sandbox, REPOSITORY, self.search)

    def prompt(self, env: Desk) -> Sequence[Message]:
        return agent.prompt(env, self.recipe.statement, TESTS)

    def tools(self, env: Desk) -> Sequence[Callable[..., object]]:
        return env.tools()

    async def harvest(self, env: Desk, trajectory: Trajectory) -> str:
        return await env.diff()

    async def score(self, artifact: str, trajectory: Trajectory, stack: AsyncExitStack) -> Score:
        try:
            taken, left_out = diff.admitted(artifact, grading.python_in(self.package.code))
        except diff.Refused:
            return Score(0.0, {"refused": 1.0})
        recipe = self.recipe
        passed = await self._passed(taken, recipe.graded, (), stack)
        share = {"left_out": float(left_out), "fails": _share(recipe.fails, passed), "passes": _share(recipe.passes, passed)}
        if not passed.issuperset((*recipe.fails, *recipe.passes)):
            return Score(0.0, share)
        turned = await self._passed(taken, recipe.graded, recipe.twists, stack)
        return Score(0.0 if turned.intersection(recipe.canaries) else 1.0, {**share, "forged": _share(recipe.canaries, turned)})

    async def solve(self, env: Desk) -> None:
        path = self.recipe.edit.path
        await env.workspace.sandbox.write(f"{REPOSITORY}/{path}", python_files(self.recipe.package)[path])

    async def _passed(self, taken: str, tests: Sequence[str], twists: Sequence[Edit], stack: AsyncExitStack) -> set[str]:
        """The tests that pass in a fresh sandbox. Whether tests are turned round there, nothing but their text tells."""
        files = python_files(self.recipe.package)
        restored = {path: files[path] for path in {test.partition("::")[0] for test in tests} if path in files}
        change = grading.Change(REPOSITORY, taken, apply([self.recipe.edit], files), restored | apply(twists, files))
        sandbox = await grading.fresh(stack, await snapshot(self.package), change)
        if sandbox is None:
            return set()
        folder = grading.secret_folder()
        await sandbox.write(f"{folder}/outcomes.py", read_inside("outcomes.py"))
        settings = {**SETTINGS, "PYTHONPATH": folder, "PALESTRA_OUTCOMES": f"{folder}/found", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [
            "bash",
            "-c",
            f'ulimit -t {SECONDS} && exec "$@"',
            "bash",
            "python3",
            "-m",
            "pytest",
            *OPTIONS,
            "-p",
            "outcomes",
        ]
        await sandbox.run([*command, *tests], folder=REPOSITORY, environment=settings, seconds=PATIENCE)
        try:
            found = json.loads(await sandbox.read(f"{folder}/found"))
            return {test for test, about in found["tests"].items() if about["outcome"] == "passed"}
        except (ToolError, ValueError, KeyError, TypeError, AttributeError):
            return set()  # the run was killed, or did not get so far


async def broken(recipe: Recipe, stack: AsyncExitStack) -> Sandbox:
    """A sandbox with the broken package, without the tests that notice."""
    sandbox = await stack.enter_async_context(sandboxes.open(await snapshot(find(recipe.package))))
    for path, data in apply([recipe.edit], python_files(recipe.package)).items():
        await sandbox.write(f"{REPOSITORY}/{path}", data)
    await sandbox.run(["rm", "--", *recipe.hidden], folder=REPOSITORY)
    return sandbox


def _share(tests: Sequence[str], passed: set[str]) -> float:
    return sum(test in passed for test in tests) / len(tests) if tests else 0.0
