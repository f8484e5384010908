"""Runs tests on many small changes of a package, one after the other: each change is made, tested in a process of its own, and
taken back. pytest is loaded once, which is most of what a short test run costs. It is put into the sandbox as it is.

    python3 trials.py REPOSITORY TRIALS RESULTS [OPTIONS FOR PYTEST]

Both files hold one JSON object a line. A trial has `edits` (path, start, old, new; start is a byte), `tests` (all when null),
`seconds`, `most`, `trace` and `warm`.
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
TEST_SECONDS = 5.0
"""Of the processor, for one test of a package that was changed. It is then taken to go on for ever."""


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
    paths = sorted({repository / str(edit["path"]) for edit in edits})
    before = [kept for path in paths for kept in keep(path)]
    for edit in sorted(edits, key=lambda edit: -int(str(edit["start"]))):  # from the end, so that places stay what they are
        path = repository / str(edit["path"])
        data = path.read_bytes()
        start, old = int(str(edit["start"])), str(edit["old"]).encode()
        assert data[start : start + len(old)] == old, f"{path} is not the file that the edit is about"
        path.write_bytes(data[:start] + str(edit["new"]).encode() + data[start + len(old) :])
    try:
        yield
    finally:
        for path, data, times in before:
            path.write_bytes(data)
            os.utime(path, ns=times)


def keep(path: Path) -> Iterator[tuple[Path, bytes, tuple[int, int]]]:
    """A file that will change and its compiled forms, which are taken away: they go by its time in seconds, too coarse here."""
    compiled = list((path.parent / "__pycache__").glob(f"{path.stem}.*"))
    for each in (path, *compiled):
        about = each.stat()
        yield each, each.read_bytes(), (about.st_atime_ns, about.st_mtime_ns)
    for each in compiled:
        each.unlink()


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
    sys.dont_write_bytecode = not trial["warm"]
    silent = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(silent, descriptor)
    traced = str(repository) if trial["trace"] else None
    most = trial["most"]
    outcomes = Outcomes(written, traced, most if isinstance(most, int) else None, TEST_SECONDS if trial["edits"] else 0.0)
    tests = trial["tests"]
    pytest.main([*options, *(tests if isinstance(tests, list) else [])], plugins=[outcomes])
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
