"""A pytest plugin that writes down what became of each test and, when asked, which functions of the package each test called.
It is put into the sandbox as it is, so it needs nothing of Palestra.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from types import CodeType, FrameType

import pytest

SHOWN = 1500


class Outcomes:
    """Written to `path` when the session ends. `traced` is the folder whose functions are told."""

    def __init__(self, path: str, traced: str | None = None) -> None:
        self.path, self.traced = path, traced
        self.tests: dict[str, dict[str, object]] = {}
        self.at_import: list[tuple[str, int]] = []
        self._called: set[CodeType] = set()
        self._started = 0.0

    @pytest.hookimpl(hookwrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        self._watch()
        yield
        self.at_import = self._seen()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._started = time.perf_counter()
        self._watch()
        yield
        test = self.tests.setdefault(item.nodeid, {"outcome": "missing"})
        test["seconds"] = round(time.perf_counter() - self._started, 4)
        if self.traced:
            test["calls"] = self._seen()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests.setdefault(report.nodeid, {"outcome": "passed"})
        expected = hasattr(report, "wasxfail")
        if report.failed and test["outcome"] != "failed":
            test.update(outcome="failed", when=report.when, **_told(report))
        elif (report.skipped or expected) and test["outcome"] == "passed":
            test["outcome"] = "skipped"

    def pytest_sessionfinish(self) -> None:
        with open(self.path, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump({"tests": self.tests, "at_import": self.at_import}, file)

    def _watch(self) -> None:
        self._called = set()
        if self.traced:
            called = self._called

            def note(frame: FrameType, event: str, argument: object) -> None:
                if event == "call":
                    called.add(frame.f_code)

            threading.setprofile(note)
            sys.setprofile(note)

    def _seen(self) -> list[tuple[str, int]]:
        """File and first line of each function that was called."""
        if not self.traced:
            return []
        sys.setprofile(None)
        threading.setprofile(None)
        inside = [code for code in list(self._called) if code.co_filename.startswith(self.traced)]
        return sorted({(os.path.relpath(code.co_filename, self.traced), code.co_firstlineno) for code in inside})


def _told(report: pytest.TestReport) -> dict[str, object]:
    """The error in a few lines, and the place in the test that it came from."""
    crash = getattr(report.longrepr, "reprcrash", None)
    entries = getattr(getattr(report.longrepr, "reprtraceback", None), "reprentries", [])
    places = [entry.reprfileloc for entry in entries if getattr(entry, "reprfileloc", None) is not None]
    return {
        "message": str(crash.message if crash else report.longrepr)[:SHOWN],
        "path": places[0].path if places else None,
        "line": places[0].lineno if places else None,
    }


def pytest_configure(config: pytest.Config) -> None:
    """As a plugin of a plain pytest run: the path comes by the environment, and does not stay there."""
    path = os.environ.pop("PALESTRA_OUTCOMES", None)
    if path is not None:
        config.pluginmanager.register(Outcomes(path))
