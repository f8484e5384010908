"""Finding, not mending: in which file a name is defined, or which function is at fault for a failing behaviour. Short, and judged
by comparing the answer, so that a small model can learn it; with code search or with bash alone, so that both can be compared.
"""

import asyncio
import posixpath
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from palestra import sandboxes
from palestra.message import JSON, Message, ToolCall, assistant, system, user
from palestra.protocols import Sandbox
from palestra.swe import grading
from palestra.swe.factory.packages import find, is_test, python_files
from palestra.swe.factory.recipe import Recipe
from palestra.swe.factory.runtime import REPOSITORY, snapshot
from palestra.swe.factory.task import broken
from palestra.task import Score, Task
from palestra.tool import Finish
from palestra.tools.code import CodeIndex, CodeSearch
from palestra.tools.shell import Shell
from palestra.trajectory import Trajectory

PER_FILE = 12
"""Names of one file, so that no file is the answer too often."""
SEARCH_LINES, BASH_BUDGET = 3, 480
"""Lines and characters of an answer: small models have small contexts."""


class Scene:
    """A package to look around in."""

    def __init__(self, sandbox: Sandbox, package: str, search: bool) -> None:
        self._shell = Shell(sandbox, REPOSITORY, keep=BASH_BUDGET)
        self._search = CodeSearch.in_sandbox(sandbox, REPOSITORY, _index(package)) if search else None

    def tools(self) -> list[Callable[..., object]]:
        return [self.search_symbol if self._search else self.bash]

    async def search_symbol(self, name: str) -> str:
        """Find where a name is defined.

        Args:
            name: such as Box or Box.fill
        """
        assert self._search is not None
        return "\n".join((await self._search.search_symbol(name)).splitlines()[:SEARCH_LINES])

    async def bash(self, command: str) -> str:
        """Run a command.

        Args:
            command: such as ls
        """
        return await self._shell.bash(command)


@cache
def _index(package: str) -> CodeIndex:
    return CodeIndex(find(package).folder())


@dataclass(frozen=True)
class Definition(Task[Scene, JSON]):
    """In which file is it defined?"""

    package: str
    kind: str
    name: str
    path: str
    search: bool = True

    async def prepare(self, cache: Path) -> None:
        await snapshot(find(self.package))
        await asyncio.to_thread(_index, self.package)

    async def setup(self, stack: AsyncExitStack) -> Scene:
        sandbox = await stack.enter_async_context(sandboxes.open(await snapshot(find(self.package))))
        return Scene(sandbox, self.package, self.search)

    def prompt(self, env: Scene) -> Sequence[Message]:
        tool = "search_symbol" if self.search else "bash"
        told = system(f"Look the name up with {tool}, then hand in the file with finish.")
        return [told, *_shown(self.search), user(_question(self.kind, self.name))]

    def tools(self, env: Scene) -> Sequence[Callable[..., object]]:
        return [*env.tools(), finish]

    async def score(self, artifact: JSON, trajectory: Trajectory, stack: AsyncExitStack) -> float:
        right = trajectory.stop == "finish" and isinstance(artifact, dict) and _same_path(artifact.get("path"), self.path)
        return float(right)

    async def solve(self, env: Scene) -> JSON:
        return {"path": self.path}


@dataclass(frozen=True)
class Fault(Task[Scene, JSON]):
    """Which function is at fault?"""

    recipe: Recipe
    search: bool = True

    async def prepare(self, cache: Path) -> None:
        await snapshot(find(self.recipe.package))
        await asyncio.to_thread(_index, self.recipe.package)

    async def setup(self, stack: AsyncExitStack) -> Scene:
        sandbox = await broken(self.recipe, stack)
        await grading.same_times(sandbox, REPOSITORY)
        return Scene(sandbox, self.recipe.package, self.search)

    def prompt(self, env: Scene) -> Sequence[Message]:
        how = "Look with search_symbol" if self.search else "Look with bash"
        task = f"{how} for the one function that causes the problem, then hand in its file and its name with finish_fault."
        return [system(task), user(self.recipe.statement)]

    def tools(self, env: Scene) -> Sequence[Callable[..., object]]:
        return [*env.tools(), finish_fault]

    async def score(self, artifact: JSON, trajectory: Trajectory, stack: AsyncExitStack) -> Score:
        given = artifact if trajectory.stop == "finish" and isinstance(artifact, dict) else {}
        path = _same_path(given.get("path"), self.recipe.edit.path)
        symbol = str(given.get("symbol", "")).strip("`'\" ()").split(".")
        full = self.recipe.symbol.split(".")
        right = path and full[-len(symbol) :] == symbol
        return Score(float(right), {"path": float(path)})

    async def solve(self, env: Scene) -> JSON:
        return {"path": self.recipe.edit.path, "symbol": self.recipe.symbol}


def finish(path: str) -> Finish:
    """Hand in the file.

    Args:
        path: such as package/module.py
    """
    return Finish({"path": path})


def finish_fault(path: str, symbol: str) -> Finish:
    """Hand in the function that is at fault.

    Args:
        path: its file
        symbol: its name
    """
    return Finish({"path": path, "symbol": symbol})


def _same_path(given: JSON, right: str) -> bool:
    if not isinstance(given, str):
        return False
    return posixpath.normpath(given.strip().removeprefix(f"{REPOSITORY}/")) == right


EXAMPLES = (
    ("boltons", "function", "chunked", "boltons/iterutils.py"),
    ("cachetools", "method", "TLRUCache.expire", "src/cachetools/__init__.py"),
    ("toolz", "class", "curry", "toolz/functoolz.py"),
)


def _shown(search: bool) -> list[Message]:
    """The worked examples, as turns."""
    turns: list[Message] = []
    for package, kind, name, path in EXAMPLES:
        [symbol] = (each for each in _index(package).outline(path) if each.name == name)
        if search:
            look = ToolCall("call_0", "search_symbol", {"name": name})
            found = f"1 definition of {name!r}: {path}:{symbol.start}-{symbol.end} {kind} {name}"
        else:
            keyword = "class" if kind == "class" else "def"
            look = ToolCall("call_0", "bash", {"command": f"grep -rn '{keyword} {name.rpartition('.')[2]}' ."})
            code = _index(package).lines(path, symbol.start, symbol.start)[0]
            found = f"./{path}:{symbol.start}:{code}"
        hand_in = ToolCall("call_0", "finish", {"path": path})
        turns += [
            user(_question(kind, name)),
            assistant("", look),
            Message("tool", found, name=look.name),
            assistant("", hand_in),
        ]
    return turns


def _question(kind: str, name: str) -> str:
    return f"In which file is the {kind} {name}?"


def definitions(packages: Iterable[str], seed: int = 0, search: bool = True) -> list[Definition]:
    """Questions about the public names of packages, in a seeded order."""
    found: list[Definition] = []
    chance = random.Random(seed)
    for package in packages:
        code = f"{find(package).code}/"
        paths = [path for path in python_files(package) if path.startswith(code) and not is_test(path)]
        symbols = [each for path in paths for each in _index(package).outline(path) if _is_asked(each.name, each.kind)]
        counts = {name: sum(each.name == name for each in symbols) for name in {each.name for each in symbols}}
        shown = {name for example, _, name, _ in EXAMPLES if example == package}
        for path in paths:
            here = [each for each in symbols if each.path == path and counts[each.name] == 1 and each.name not in shown]
            for symbol in chance.sample(here, min(PER_FILE, len(here))):
                name = f"{package}-{symbol.name}"
                found.append(Definition(name, package, symbol.kind, symbol.name, path, search))
    chance.shuffle(found)
    return found


def _is_asked(name: str, kind: str) -> bool:
    return kind in ("class", "function", "method") and not any(step.startswith("_") for step in name.split("."))


def faults(recipes: Iterable[Recipe], search: bool = True) -> list[Fault]:
    """Questions about the broken packages of a set."""
    return [Fault(f"fault-{recipe.id}", recipe, search) for recipe in recipes]
