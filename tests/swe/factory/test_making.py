"""Making and proving tasks of a real package, in a real sandbox."""

import random
from pathlib import Path

import pytest
from swe.factory.conftest import needs_bwrap

from palestra.checking import check
from palestra.swe.factory import making
from palestra.swe.factory.forging import FORGERIES
from palestra.swe.factory.packages import find, python_files
from palestra.swe.factory.proving import Proof, play_forgeries, prove
from palestra.swe.factory.task import BugFix
from palestra.swe.factory.trials import Bench, Trial, bench

pytestmark = [needs_bwrap, pytest.mark.usefixtures("provider")]


async def test_tasks_are_proven_as_they_are_made(tmp_path: Path) -> None:
    said: list[str] = []
    made = await making.make(find("toolz"), 4, seed=7, say=said.append)
    assert [each.id for each in made.recipes] == ["toolz-0000", "toolz-0001", "toolz-0002", "toolz-0003"]
    assert made.tried["kept"] == 4
    assert said[0].startswith("toolz: ")
    found = await check([BugFix(each.id, each) for each in made.recipes], tmp_path, lambda _: None)
    assert (found["gold"], found["noop"], found["failures"]) == (4, 4, {})
    proof = await prove(made.recipes, 2, 0, lambda _: None)
    assert (proof.tasks, proof.held) == (2, 2)
    assert proof.noticed + len(proof.missed) == proof.wrong
    forged = Proof()
    await play_forgeries(made.recipes[:1], 1, 0, forged)
    assert set(forged.forgeries) == set(FORGERIES)
    assert all(counts["tried"] == 1 and counts["rewarded"] == 0 for counts in forged.forgeries.values())


async def test_tests_that_look_at_a_clock_are_known() -> None:
    timed = making.timekeepers(python_files("sqlparse"))
    assert "tests/test_dos_prevention.py::TestDoSPrevention::test_nested_case_within_cap_under_1s" in timed
    assert {test.partition("::")[0] for test in timed} == {"tests/test_dos_prevention.py"}


async def test_a_survey_knows_who_calls_what() -> None:
    async with bench(find("toolz")) as trials:
        survey = await trials.survey()
        files = python_files("toolz")
        first, again = (making.candidates(find("toolz"), files, survey, random.Random(3)) for _ in range(2))
        assert first == again != making.candidates(find("toolz"), files, survey, random.Random(4))
        line = files["toolz/itertoolz.py"].decode().splitlines().index("def interleave(seqs):") + 1
        assert "toolz/tests/test_itertoolz.py::test_interleave" in survey.callers["toolz/itertoolz.py", line]
        assert "toolz/tests/test_itertoolz.py::test_groupby" not in survey.callers["toolz/itertoolz.py", line]
        await _trials_are_apart(trials)


async def _trials_are_apart(trials: Bench) -> None:
    """What one trial does, the next does not see; one that hangs is stopped."""
    data = python_files("toolz")["toolz/itertoolz.py"]
    every = making.mutations("toolz/itertoolz.py", data)
    mutation = next(each for each in every if (each.symbol, each.kind) == ("interleave", "body"))
    test = ["toolz/tests/test_itertoolz.py::test_interleave"]
    hangs = making.Edit("toolz/__init__.py", 0, "", "while True: pass\n")
    broken, whole, late, after = await trials.run(
        [Trial([mutation.edit], test), Trial([], test), Trial([hangs], test, seconds=3.0), Trial([], test)]
    )
    assert list(broken.failed) == list(whole.passed) == list(after.passed) == test
    assert "NotImplementedError" in broken.failed[test[0]].message
    assert (late.late, late.passed, late.failed) == (True, {}, {})
