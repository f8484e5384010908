import re
import statistics
from pathlib import Path

import pytest

from palestra.errors import ConfigError
from palestra.lab import workload
from palestra.lab.workload import FOLDER, Job, Turn, Workload


def test_a_step_is_drawn_the_same_every_time(w1: Workload) -> None:
    jobs = w1.draw(0, 3)
    assert jobs == w1.draw(0, 3)
    assert jobs != w1.draw(0, 4)
    assert jobs != w1.draw(1, 3)
    assert [len(group) for group in jobs] == [8] * 64


def test_averages_are_those_of_the_published_run(w1: Workload) -> None:
    jobs = [job for step in range(6) for group in w1.draw(0, step) for job in group]
    assert statistics.fmean(len(job.turns) for job in jobs) == pytest.approx(27, rel=0.06)
    assert statistics.fmean(sum(turn.output_tokens for turn in job.turns) for job in jobs) == pytest.approx(18_400, rel=0.04)
    assert statistics.fmean(final(job) for job in jobs) == pytest.approx(29_000, rel=0.04)
    assert statistics.fmean(job.init_seconds for job in jobs) == pytest.approx(80, rel=0.04)
    assert statistics.fmean(job.reward_seconds for job in jobs) == pytest.approx(320, rel=0.04)


def test_limits_are_those_that_are_known(w1: Workload) -> None:
    limits = [w1.limits(w1.draw(0, step)) for step in range(6)]
    assert statistics.fmean(each.gpu for each in limits) == pytest.approx(1007, rel=0.03)
    assert statistics.fmean(each.init for each in limits) == pytest.approx(852, rel=0.03)
    assert statistics.fmean(each.reward for each in limits) == pytest.approx(871, rel=0.05)
    assert statistics.fmean(each.critical_path for each in limits) == pytest.approx(1257, rel=0.1)
    assert statistics.fmean(each.step for each in limits) == pytest.approx(1600, rel=0.03)


def test_limits_by_hand(w1: Workload) -> None:
    job = Job(init_seconds=48.0, turns=(Turn(1000, 100, 5.0), Turn(200, 50, 0.0)), reward_seconds=192.0)
    limits = w1.limits([[job], [job]])
    attended = 100 * 1050 + 50 * 1325
    assert limits.gpu == pytest.approx(2 * (0.016 * attended / 690_000 + 0.0004 * 150 + 1200 / 10_000) / 8)
    assert (limits.init, limits.reward) == (2.0, 2.0)
    alone = 48 + 192 + 5 + 150 * (0.016 + 0.00005)
    assert limits.critical_path == pytest.approx(alone + 1200 / 512 * (0.016 + 0.0064))
    assert limits.step == limits.gpu + 600
    whole = workload.load("w1_whole_chunks").limits([[job], [job]])
    assert whole.critical_path == pytest.approx(alone + 3 * (0.016 + 0.0064))
    assert whole.step == limits.step


def test_limits_count_a_shared_prompt_once() -> None:
    shared = workload.load("w1_shared")
    job = Job(init_seconds=48.0, turns=(Turn(3000, 100, 5.0), Turn(200, 50, 0.0)), reward_seconds=192.0)
    attended = 8 * (100 * 3050 + 50 * 3325) - 7 * 150 * 2999
    prefilled = 8 * 3200 - 7 * 2999
    gpu = (0.016 * attended / 690_000 + 0.0004 * 8 * 150 + prefilled / 10_000) / 8
    assert shared.limits([[job] * 8]).gpu == pytest.approx(gpu)


@pytest.mark.parametrize(("name", "setting"), [("w1_shared", "shares_prompts"), ("w1_whole_chunks", "whole_chunks")])
def test_variants_of_w1_differ_from_it_in_nothing_else(w1: Workload, name: str, setting: str) -> None:
    assert workload.load(name) == w1.model_copy(update={"engine": w1.engine.model_copy(update={setting: True})})


def test_no_context_goes_beyond_its_end(w1: Workload) -> None:
    lengths = [final(job) for group in w1.draw(0, 0) for job in group]
    assert max(lengths) == w1.context.end
    cut = [job for group in w1.draw(0, 0) for job in group if final(job) == w1.context.end]
    assert {job.turns[-1].tool_seconds for job in cut} == {0.0}
    assert all(turn.output_tokens > 0 for job in cut for turn in job.turns)


def test_every_workload_that_ships_can_be_read() -> None:
    names = sorted(file.stem for file in FOLDER.glob("*.toml"))
    assert names == ["bare", "costly_init", "long_tools", "sketch", "w1", "w1_shared", "w1_whole_chunks"]
    for name in names:
        assert workload.load(name).batch.tasks == (4 if name == "sketch" else 64)
    assert workload.load("costly_init").init.mean == 480.0
    assert workload.load(str(FOLDER / "bare.toml")).reward.mean == 4.0


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("samples = 8", "sample = 8", "unknown key 'batch.sample'; did you mean 'samples'?"),
        ("[tools]", "[tool]", "unknown key 'tool'; did you mean 'tools'?"),
        ("capacity = 48", "", "the key 'init.capacity' is missing"),
        ("units = 8", "units = 0", "engine.units = 0: input should be greater than 0"),
        ("end = 32768", "end = 2000", "context.end = 2000 leaves no room after context.start = 3000"),
        ("kv_tokens = 690000", "kv_tokens = 30000", "engine.kv_tokens = 30000 does not hold one context of 32768"),
        ("least = 4", "least = 51", "turns.least = 51 is more than turns.most = 50"),
        ("most = 50", "most = 1000000000", "= 512000000000 turns a step; the lab plays at most 10000000 of them"),
        ("mean = 80.0", "mean = inf", "init.mean = inf: input should be a finite number"),
        ("mean = 80.0", "mean = 1e10", "init.mean = 10000000000.0: input should be less than or equal to 1000000"),
        ("sigma = 0.5", "sigma = 1e200", "init.sigma = 1e+200: input should be less than or equal to 10"),
        ("[batch]", "[batch", "not valid TOML"),
    ],
)
def test_a_bad_file_is_named_with_its_fault(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text((FOLDER / "w1.toml").read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        workload.load(str(file))
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    assert complaint in message
    assert "\n" not in message


def test_a_file_may_say_only_what_differs(w1: Workload, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('base = "bare"\n[engine]\nunits = 4\n', encoding="utf-8")
    mine = workload.load(str(file))
    assert mine.reward.mean == 4.0
    assert mine.engine == w1.engine.model_copy(update={"units": 4})
    for line, complaint in (
        ('base = "w11"', "no workload 'w11'; did you mean 'w1'"),
        ("base = 1", 'base = 1: give the name of a workload that ships, such as "w1"'),
        ('base = "w1"\n[engine]\nunit = 4', "unknown key 'engine.unit'; did you mean 'units'?"),
        ('base = "w1"\nengine = 3', "engine = 3: input should be a valid dictionary"),
    ):
        file.write_text(line, encoding="utf-8")
        with pytest.raises(ConfigError, match=re.escape(complaint)):
            workload.load(str(file))


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no workload 'longtools'; did you mean 'long_tools'"):
        workload.load("longtools")
    with pytest.raises(ConfigError, match="no workload file"):
        workload.load("/nowhere/w1.toml")


def final(job: Job) -> int:
    return sum(turn.new_tokens + turn.output_tokens for turn in job.turns)
