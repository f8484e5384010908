"""What is taken from the official `swebench` package: its log parsers, and its table of how each version of a repository is
installed and tested. It is fetched once into the cache without the packages that it depends on, and runs in a process of its own.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from palestra.errors import UsageError
from palestra.sources import installed
from palestra.swe.bench.instance import R2E_PARSER

LOCK = Path(__file__).parent / "swebench.txt"
SECONDS = 120
"""For one log, which takes a fraction of one. Agents' code writes logs, and could write one that never ends to be matched."""

PASSED = ("PASSED", "XFAIL")


def specs(repo: str, version: str) -> Mapping[str, Any]:
    """How that version is installed and tested; empty where the package does not know it."""
    return _table().get(repo, {}).get(version, {})


@cache
def _table() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    found: Mapping[str, Mapping[str, Mapping[str, Any]]] = json.loads(_run("specs"))
    return found


@dataclass(frozen=True)
class Reading:
    """What a log says."""

    statuses: Mapping[str, str]
    """What became of each test, as the official parser has it."""
    failed: frozenset[str]
    """The tests of which some line says that they failed, whatever others say."""

    @property
    def passed(self) -> set[str]:
        return {test for test, status in self.statuses.items() if status in PASSED}


async def read(parser: str, log: bytes) -> Reading:
    """`parser` is the name of a parser or of a repository."""
    try:
        said = json.loads(await asyncio.to_thread(_run, "parse", "parse_log_pytest" if parser == R2E_PARSER else parser, log=log))
    except subprocess.TimeoutExpired:
        return Reading({}, frozenset())
    name = _r2e_name if parser == R2E_PARSER else str
    return Reading({name(test): status for test, status in said["statuses"].items()}, frozenset(map(name, said["failed"])))


def _r2e_name(test: str) -> str:
    return ".".join(test.split("::")[1:])


def _run(*words: str, log: bytes = b"") -> bytes:
    script = Path(__file__).with_name("log_parsing.py")
    folder = installed(LOCK, "the swebench package")
    done = subprocess.run(
        [sys.executable, "-I", str(script), str(folder), *words], input=log, capture_output=True, timeout=SECONDS
    )
    if done.returncode:
        raise UsageError(f"the swebench package failed at {' '.join(words)}: {done.stderr.decode(errors='replace')[-300:]}")
    return done.stdout
