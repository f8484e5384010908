"""Runs tests on many small changes of a package, one after the other: each change is made, tested in a process of its own, and
taken back. pytest is loaded once, which is most of what a short test run costs. It is put into the sandbox as it is.

    python3 trials.py REPOSITORY TRIALS RESULTS [OPTIONS FOR PYTEST]

Both files hold one JSON object a line. A trial has `edits` (path, start, old, new; start is a byte), `tests` (all when null),
`seconds`, `trace` and `warm`.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from outcomes import Outcomes  # type: ignore[import-not-found]  # it stands beside this file

MEMORY = 700 * 2**20


def main(repository: Path, trials: Path, results: Path, options: list[str]) -> None:
    with results.open("a", encoding="utf-8") as file:
        for line in trials.read_text(encoding="utf-8").splitlines():
            trial = json.loads(line)
            with changed(repository, trial["edits"]):
                found = run(repository, trial, options)
            file.write(json.dumps(found) + "\n")
            file.flush()


@contextlib.contextmanager
def changed(repository: Path, edits: list[dict[str, object]]) -> Iterator[None]:
    before: dict[Path, bytes] = {}
    for edit in sorted(edits, key=lambda edit: -int(str(edit["start"]))):  # from the end, so that places stay what they are
        path = repository / str(edit["path"])
        data = path.read_bytes()
        before.setdefault(path, data)
        start, old = int(str(edit["start"])), str(edit["old"]).encode()
        assert data[start : start + len(old)] == old, f"{path} is not the file that the edit is about"
        path.write_bytes(data[:start] + str(edit["new"]).encode() + data[start + len(old) :])
    for path in before:
        forget(path)
    try:
        yield
    finally:
        for path, data in before.items():
            path.write_bytes(data)
            forget(path)


def forget(path: Path) -> None:
    """Compiled forms of a file that has changed: they go by its time in seconds, which is too coarse here."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def run(repository: Path, trial: dict[str, object], options: list[str]) -> dict[str, object]:
    written = f"/tmp/outcomes-{os.getpid()}.json"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(written)
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        test(repository, trial, written, options)
    late = not wait(child, float(str(trial["seconds"])))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if late:
        os.waitpid(child, 0)
    try:
        found: dict[str, object] = json.loads(Path(written).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = {"tests": {}}
    return {**found, "late": late, "seconds": round(time.monotonic() - started, 3)}


def wait(child: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.01)
    return False


def test(repository: Path, trial: dict[str, object], written: str, options: list[str]) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.chdir(repository)
    sys.path[0] = str(repository)
    sys.dont_write_bytecode = not trial.get("warm", False)
    silent = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(silent, descriptor)
    outcomes = Outcomes(written, str(repository) if trial.get("trace") else None)
    tests = trial["tests"]
    pytest.main([*options, *(tests if isinstance(tests, list) else [])], plugins=[outcomes])
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
