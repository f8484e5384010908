"""A pytest plugin that writes down what became of each test and, when asked, which functions of the package each test called.
It is put into the sandbox as it is, so it needs nothing of Palestra.
"""

import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType

import pytest

SHOWN = 1500


def spent() -> float:
    """Seconds of the processor so far, for this process and those that it waited for: on a busy machine they are the same."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


class Outcomes:
    """Written to `path` when the session ends. `traced` is the folder whose functions are told. The session ends early when more
    than `most` tests have failed, and is killed when one test computes for more than `seconds`."""

    def __init__(self, path: str, traced: str | None = None, most: int | None = None, seconds: float = 0.0) -> None:
        self.path, self.traced, self.most, self.seconds = path, traced, most, seconds
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
        self._started = spent()
        self._watch()
        signal.setitimer(signal.ITIMER_PROF, self.seconds)
        yield
        signal.setitimer(signal.ITIMER_PROF, 0)
        test = self.tests.setdefault(item.nodeid, {"outcome": "missing"})
        test["seconds"] = round(spent() - self._started, 4)
        if self.traced:
            test["calls"] = self._seen()
        if self.most is not None and sum(each["outcome"] == "failed" for each in self.tests.values()) > self.most:
            item.session.shouldstop = "enough have failed"

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Where in the test an error came from. pytest would show much more, which takes it longer than most tests."""
        yield
        if call.excinfo is not None:
            place = call.excinfo.traceback.cut(path=item.path)[0]
            test = self.tests.setdefault(item.nodeid, {"outcome": "passed"})
            test.setdefault("path", os.path.relpath(place.path))
            test.setdefault("line", place.lineno + 1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests.setdefault(report.nodeid, {"outcome": "passed"})
        expected = hasattr(report, "wasxfail")
        if report.failed and test["outcome"] != "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            message = str(crash.message if crash else report.longrepr)[:SHOWN]
            test.update(outcome="failed", when=report.when, message=message)
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
                called.add(frame.f_code)  # it returns nothing, so it is told of calls alone, and not of lines

            threading.settrace(note)
            sys.settrace(note)

    def _seen(self) -> list[tuple[str, int]]:
        """File and first line of each function that was called."""
        if not self.traced:
            return []
        sys.settrace(None)
        threading.settrace(None)
        inside = [code for code in list(self._called) if code.co_filename.startswith(self.traced)]
        return sorted({(os.path.relpath(code.co_filename, self.traced), code.co_firstlineno) for code in inside})


def pytest_configure(config: pytest.Config) -> None:
    """As a plugin of a plain pytest run: the path comes by the environment, and does not stay there."""
    path = os.environ.pop("PALESTRA_OUTCOMES", None)
    if path is not None:
        config.pluginmanager.register(Outcomes(path))
