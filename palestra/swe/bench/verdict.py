"""From a log to a verdict. The official parsers say what became of each test; two things are asked beyond that, since the code
under test can write into the log: a test that must fail did fail, and no test is told both to have failed and to have passed.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from palestra.swe.bench import official, plan
from palestra.swe.bench.instance import Instance


@dataclass(frozen=True)
class Canary:
    """A test that nobody can pass, beside the hidden ones. Who passes everything, or says so, is found out by it."""

    name: str
    path: str
    code: str
    directive: str

    @classmethod
    def beside(cls, instance: Instance) -> "Canary | None":
        """None where no test file is named that it could stand beside."""
        files = [path for path in plan.changed_files(instance.test_patch) if path.endswith(".py")]
        if not plan.directives(instance) or not files:
            return None
        name = f"test_{secrets.token_hex(6)}"
        likely = [path for path in files if path.rpartition("/")[2].startswith("test")]  # others may be what tests read
        folder = (likely or files)[0].rpartition("/")[0]
        path = f"{folder}/{name}.py" if folder else f"{name}.py"
        if instance.repo == "django/django":
            code = f"import unittest\n\n\nclass Case(unittest.TestCase):\n    def {name}(self):\n        self.assertEqual(1, 2)\n"
            return cls(name, path, code, path.removesuffix(".py").removeprefix("tests/").replace("/", "."))
        return cls(name, path, f"def {name}():\n    assert 1 == 2\n", path)

    def failed(self, statuses: Mapping[str, str]) -> bool:
        own = [status for test, status in statuses.items() if self.name in test]
        return bool(own) and not set(own) & set(official.PASSED)


@dataclass(frozen=True)
class Verdict:
    fails: float
    """The share of tests that had to begin to pass and did."""
    passes: float
    """The share of those that had to go on passing and did."""
    forged: bool

    @property
    def resolved(self) -> bool:
        return self.fails == 1.0 and self.passes == 1.0 and not self.forged


async def judge(instance: Instance, log: bytes, canary: Canary | None) -> Verdict:
    found = await official.read(instance.parser or instance.repo, log)
    denied = found.passed & found.failed & {*instance.fails, *instance.passes}
    silent = canary is not None and bool(found.passed) and not canary.failed(found.statuses)
    forged = bool(denied) or silent
    return Verdict(_share(instance.fails, found.passed), _share(instance.passes, found.passed), forged)


def _share(tests: Sequence[str], passed: set[str]) -> float:
    return sum(test in passed for test in tests) / len(tests) if tests else 1.0
