"""Trying changes of a package against its tests, in a sandbox: who fails, who passes, and in a survey of the untouched package
which tests call which functions.
"""

import json
import re
from collections.abc import AsyncIterator, Container, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from palestra import sandboxes
from palestra.errors import TaskError
from palestra.message import JSON
from palestra.protocols import Sandbox
from palestra.swe.factory.edit import Edit
from palestra.swe.factory.packages import Package, is_test
from palestra.swe.factory.runtime import OPTIONS, REPOSITORY, SETTINGS, read_inside, snapshot

SLOW = 0.5
"""Seconds of the processor. A test that takes more does not grade, and is not traced, which takes many times as long."""
SUITE_SECONDS = 300.0
_INSIDE = "/tmp/factory"
_READ = 2**28
_ADDRESS = re.compile(r"(0x|(?<=\.\.)x?)[0-9a-f]{6,}|(?<=id=')[0-9]{9,}")
"""Of an object, whole or cut by pytest, or as a mock's id: it differs from run to run."""

Place = tuple[str, int]
"""A function by its file and its first line."""


@dataclass(frozen=True)
class Trial:
    edits: Sequence[Edit]
    tests: Sequence[str] | None
    """All when None."""
    seconds: float = SUITE_SECONDS
    most: int | None = None
    """Stop when more than so many have failed."""
    trace: bool = False
    warm: bool = False
    """Keep what Python compiles, for the trials that follow."""


@dataclass(frozen=True)
class Told:
    """What a failing test said."""

    message: str
    path: str
    line: int | None


@dataclass(frozen=True)
class Result:
    passed: dict[str, float]
    """With the seconds of the processor that each took."""
    failed: dict[str, Told]
    calls: dict[str, frozenset[Place]]
    at_import: frozenset[Place]
    late: bool


@dataclass(frozen=True)
class Survey:
    """An untouched package: tests that always pass, and which of them call a function."""

    passing: dict[str, float]
    callers: dict[Place, list[str]]
    """Those that call the fewest functions come first: they are most about this one."""
    at_import: frozenset[Place]


class Bench:
    """A sandbox in which trials of one package run."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox, self._count = sandbox, 0

    async def run(self, trials: Sequence[Trial]) -> list[Result]:
        self._count += 1
        given, written = f"{_INSIDE}/{self._count}.given", f"{_INSIDE}/{self._count}.found"
        await self._sandbox.write(given, "".join(json.dumps(_plain(trial)) + "\n" for trial in trials).encode())
        seconds = sum(trial.seconds + 5 for trial in trials) + 60
        command = ["python3", f"{_INSIDE}/trials.py", REPOSITORY, given, written, *OPTIONS]
        ran = await self._sandbox.run(command, folder=REPOSITORY, environment=SETTINGS, seconds=seconds)
        if ran.code:
            raise TaskError(f"trials ended with {ran.code}: {ran.stderr.tail.decode(errors='replace')[-500:]}")
        lines = (await self._sandbox.read(written, _READ)).decode().splitlines()
        return [_result(json.loads(line)) for line in lines]

    async def survey(self, without: Container[str] = ()) -> Survey:
        """Run the whole suite twice, its quick tests with tracing and in reverse. What does not pass each time is left alone."""
        first, second = await self.run([Trial((), None, warm=True), Trial((), None)])
        twice = [test for test in second.passed if test in first.passed and test.partition("[")[0] not in without]
        quick = [test for test in twice if second.passed[test] < SLOW]
        traced, reverse = await self.run([Trial((), quick, trace=True), Trial((), quick[::-1])])
        stable = [test for test in quick if test in traced.passed and test in reverse.passed]
        callers: dict[Place, list[str]] = {}
        for test in sorted(stable, key=lambda test: (len(traced.calls[test]), test)):
            for place in traced.calls[test]:
                if not is_test(place[0]):
                    callers.setdefault(place, []).append(test)
        return Survey({test: second.passed[test] for test in stable}, callers, traced.at_import)


@asynccontextmanager
async def bench(package: Package) -> AsyncIterator[Bench]:
    async with sandboxes.open(await snapshot(package)) as sandbox:
        for name in ("outcomes.py", "trials.py"):
            await sandbox.write(f"{_INSIDE}/{name}", read_inside(name))
        yield Bench(sandbox)


def _plain(trial: Trial) -> dict[str, JSON]:
    tests = None if trial.tests is None else list(trial.tests)
    return {
        "edits": [edit.to_json() for edit in trial.edits],
        "tests": tests,
        "seconds": trial.seconds,
        "most": trial.most,
        "trace": trial.trace,
        "warm": trial.warm,
    }


def _result(found: dict[str, JSON]) -> Result:
    tests = found["tests"]
    return Result(
        {test: about.get("seconds", 0.0) for test, about in tests.items() if about["outcome"] == "passed"},
        {
            test: Told(_ADDRESS.sub(r"\1…", about["message"]), about.get("path") or "", about.get("line"))
            for test, about in tests.items()
            if about["outcome"] == "failed" and about.get("when") == "call"
        },
        {test: _places(about.get("calls", ())) for test, about in tests.items()},
        _places(found.get("at_import", ())),
        found["late"],
    )


def _places(pairs: Sequence[Sequence[JSON]]) -> frozenset[Place]:
    return frozenset((str(path), int(line)) for path, line in pairs)
