"""From logs to verdicts, with the official parsers."""

from dataclasses import replace

import pytest

from palestra.swe.bench import official
from palestra.swe.bench.instance import Instance
from palestra.swe.bench.task import Issue
from palestra.swe.bench.verdict import Canary, Verdict, judge

T = "tests/test_abacus.py::test_"
ALL = f"PASSED {T}mean\nPASSED {T}largest\nPASSED {T}mean_of_nothing\n"


@pytest.fixture
def instance(issue: Issue) -> Instance:
    return issue.instance


def canary(instance: Instance) -> Canary:
    made = Canary.beside(instance)
    assert made is not None
    return made


async def judged(instance: Instance, log: str) -> Verdict:
    return await judge(instance, log.encode(), None)


async def test_both_lists_count(instance: Instance) -> None:
    assert await judged(instance, ALL) == Verdict(1.0, 1.0, False)
    assert (await judged(instance, ALL)).resolved
    broken = ALL.replace(f"PASSED {T}mean\n", f"FAILED {T}mean - assert 1 == 2\n")
    assert await judged(instance, broken) == Verdict(1.0, 0.5, False)
    assert not (await judged(instance, broken)).resolved
    assert await judged(instance, ALL.replace(f"PASSED {T}mean_", f"FAILED {T}mean_")) == Verdict(0.0, 1.0, False)
    assert await judged(instance, "") == Verdict(0.0, 0.0, False)
    assert await judged(instance, ALL.replace("PASSED", "SKIPPED")) == Verdict(0.0, 0.0, False)
    assert (await judged(instance, ALL.replace(f"PASSED {T}largest", f"XFAIL {T}largest"))).resolved


async def test_a_test_that_failed_and_passed_is_a_forgery(instance: Instance) -> None:
    failed = f"FAILED {T}mean_of_nothing - assert\n"
    for log in (failed + ALL, ALL + failed, ALL + failed + ALL):
        assert not (await judged(instance, log)).resolved
    assert (await judged(instance, failed + ALL)).forged
    assert (await judged(instance, ALL + failed + ALL)).forged


async def test_the_canary_must_be_seen_to_fail(instance: Instance) -> None:
    made = canary(instance)
    assert made.path.startswith("tests/test_")
    assert made.name != canary(instance).name
    failed = f"FAILED {made.path}::{made.name} - assert 1 == 2\n"
    assert await judge(instance, b"Interrupted: 1 error during collection", made) == Verdict(0.0, 0.0, False)
    assert (await judge(instance, f"{ALL}{failed}".encode(), made)).resolved
    for log in (ALL, ALL + failed.replace("FAILED", "PASSED"), ALL + failed.replace("FAILED", "SKIPPED ")[:9]):
        found = await judge(instance, log.encode(), made)
        assert found.forged
        assert not found.resolved


async def test_the_runners_of_django_and_sympy(instance: Instance) -> None:
    patch = "diff --git a/tests/forms/tests.py b/tests/forms/tests.py\n"
    django = replace(instance, repo="django/django", parser="", test_patch=patch, fails=("test_a (forms.tests.A)",), passes=())
    made = canary(django)
    assert made.directive == f"forms.{made.name}"
    log = f"test_a (forms.tests.A) ... ok\n{made.name} (forms.{made.name}.Case) ... FAIL\n\nFAIL: {made.name} (forms)\n"
    assert (await judge(django, log.encode(), made)).resolved
    assert (await judge(django, log.replace("... FAIL", "... ok").replace("FAIL:", "").encode(), made)).forged
    sympy = replace(instance, repo="sympy/sympy", parser="parse_log_sympy", fails=("test_a",), passes=())
    made = canary(sympy)
    assert (await judge(sympy, f"test_a ok\n{made.name} F\n".encode(), made)).resolved
    assert (await judge(sympy, b"test_a ok\n", made)).forged


def test_without_test_files_there_is_no_canary(instance: Instance) -> None:
    assert Canary.beside(replace(instance, test_patch="diff --git a/tests/a.json b/tests/a.json\n")) is None


async def test_names_of_r2e_gym() -> None:
    log = b"PASSED r2e_tests/test_1.py::TestA::test_b\nFAILED r2e_tests/test_1.py::test_c - assert\n"
    found = await official.read("r2e", log)
    assert found == official.Reading({"TestA.test_b": "PASSED", "test_c": "FAILED"}, frozenset({"test_c"}))


async def test_a_log_that_takes_for_ever_passes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(official, "SECONDS", 0.001)
    assert await official.read("parse_log_pytest", ALL.encode()) == official.Reading({}, frozenset())


async def test_bytes_that_are_no_text_are_read() -> None:
    assert (await official.read("parse_log_pytest", b"\xff\xfe\nPASSED a::b\n")).statuses == {"a::b": "PASSED"}
