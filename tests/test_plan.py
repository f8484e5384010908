"""The advisor on small runs whose times are known: sleeps for stages, tokens and gradients, under several dispatchers."""

import asyncio
import json
import shutil
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playing import Dice, Probe
from test_training_loop import Notes

from palestra import checkpoint, training
from palestra.backends.opening import Opened
from palestra.cli import main
from palestra.config import Config, Loss, StreamDispatch, parse
from palestra.errors import InfrastructureError
from palestra.lab import clock
from palestra.lab.fitting import SamplerFit, StageFit, Timeline, fit_sampler, fit_stage, nonnegative
from palestra.lab.machine import Machine, Parts, Work
from palestra.lab.model import Ending, Job, JobGroup, Model, Piece, model_of
from palestra.lab.recording import Call, Played, PlayedGroup, Recording, Step, read
from palestra.lab.replay import Times, replay
from palestra.learner import REFILLS
from palestra.ledger import Ledger, StepRecord
from palestra.message import JSON
from palestra.plan import Plan, plan
from palestra.policy import TokenPolicies
from palestra.protocols import Renderer, Sampling, Session
from palestra.report import Reporter
from palestra.runs import RunFolder
from palestra.trajectory import Completion, Key, Sample, Span, Trajectory

# --- a run made of sleeps ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sleeper(Probe):
    init: float = 0.05
    reward: float = 0.05

    async def setup(self, stack: AsyncExitStack) -> str:
        await asyncio.sleep(self.init)
        return await super().setup(stack)

    async def score(self, artifact: JSON, trajectory: Trajectory, stack: AsyncExitStack) -> float:
        await asyncio.sleep(self.reward)
        return float(trajectory.index % 2)


class SlowDice(Dice):
    """A millisecond and a half for each token, however many are under way."""

    @asynccontextmanager
    async def session(self, seed: int, expected_tokens: int) -> AsyncIterator[Any]:
        async with super().session(seed, expected_tokens) as throw:
            yield _Slow(throw)


@dataclass
class _Slow:
    throw: Session

    async def sample(self, tokens: Sequence[int], sampling: Sampling) -> Completion:
        completion = await self.throw.sample(tokens, sampling)
        await asyncio.sleep(0.0015 * len(completion.tokens))
        return completion


@dataclass
class SlowNotes(Notes):
    gradient_seconds: float = 0.02

    async def accumulate(self, samples: Sequence[Sample], loss: Loss) -> None:
        await asyncio.sleep(self.gradient_seconds)
        await super().accumulate(samples, loss)

    async def step(self, learning_rate: float) -> dict[str, float]:
        await asyncio.sleep(0.05)
        return await super().step(learning_rate)


@dataclass
class Runs:
    """Trains into folders."""

    at: Path
    renderer: Renderer
    monkeypatch: pytest.MonkeyPatch
    task: type[Sleeper] = Sleeper
    trainer: Notes = field(default_factory=SlowNotes)

    async def train(self, name: str, dispatch: dict[str, Any], plan: dict[str, Any] | None = None, **seconds: float) -> Path:
        tasks = [self.task(f"train-{number}", **seconds) for number in range(8)]
        self.monkeypatch.setattr("playing.TRAIN", tasks, raising=False)
        self.monkeypatch.setattr("playing.HELDOUT", [Sleeper("held", init=0.0, reward=0.0)], raising=False)
        self.monkeypatch.setattr(training, "open_backend", self.open_backend)
        self.monkeypatch.setattr("palestra.report.learning_curve", lambda *_: None)
        values = {
            "run": {"folder": str(self.at / name)},
            "tasks": {"train": "playing:TRAIN", "heldout": "playing:HELDOUT"},
            # Nothing is asked of this backend, but that it does not share its processors with training.
            "backend": {"kind": "scripted", "script": "playing:play", "model": str(self.at)},
            "training": {"steps": 2, "groups": 3, "samples": 4, "learning_rate": 0.1} | (plan or {}),
            "evaluation": {"every": 1, "greedy": False},
            "dispatch": dispatch,
        }
        config = parse(values)
        RunFolder.create(self.at / name, config)
        return await self.resume(name)

    async def resume(self, name: str) -> Path:
        run, config = RunFolder.reopen(self.at / name)
        await training.train(config, run, Reporter(config, run, quiet=True))
        return run.path

    @asynccontextmanager
    async def open_backend(self, config: Config, training: bool) -> AsyncIterator[Opened]:
        yield Opened(TokenPolicies(SlowDice(self.renderer), self.renderer), self.renderer, self.trainer)


@pytest.fixture
def runs(tmp_path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path, renderer, monkeypatch)


async def planned(folder: Path, picture: Path | None = None) -> Plan:
    return await asyncio.to_thread(plan, folder, picture)  # the lab has an event loop of its own


BOUNDED = {"kind": "bounded", "slots": 6}
STREAM = {"kind": "stream", "init": 3, "run": 6, "reward": 3}


@pytest.mark.parametrize(
    ("dispatch", "more"),
    [(BOUNDED, {}), (STREAM, {}), (STREAM, {"staleness": 1}), ({"kind": "pipeline", "init": 3, "run": 6, "reward": 2}, {})],
    ids=["bounded", "stream", "stale", "pipeline"],
)
async def test_the_replay_takes_as_long_as_the_run(runs: Runs, dispatch: dict[str, Any], more: dict[str, Any]) -> None:
    folder = await runs.train("run", dispatch, more)
    made = await planned(folder)
    assert abs(made.error) < 0.15
    assert (made.steps, made.rollouts, made.retried) == (2, 24, 0)
    assert sum(made.critical_path.values()) == pytest.approx(1)
    assert all(0 <= use.share <= 1 for use in made.busy)
    assert all(use.mean <= use.limit + 1e-6 for use in made.busy if use.limit is not None)
    assert [what.saving for what in made.what_if] == sorted((what.saving for what in made.what_if), reverse=True)
    recording = read(folder)
    nothing = Times(init=0.0, sampling=0.0, tools=0.0, reward=0.0, training=0.0)
    model = model_of(recording)
    left = await asyncio.to_thread(replay, model, recording.config.dispatch, recording.training.staleness, nothing)
    pieces = [piece for group in model.groups for job in group.jobs for piece in job.run or ()]
    # Only what lies between calls and tools is left; how long that is, is the machine's affair.
    assert left <= sum(piece.work.wait for piece in pieces if piece.what == "rest") + 1e-3


async def test_what_free_inits_would_save(runs: Runs) -> None:
    """Everything at once, so that each step has one init on its path; and the run without them shows the same."""
    alike = {"kind": "bounded", "slots": 12}
    slow = await planned(await runs.train("slow", alike, init=0.3))
    fastest = min([read(await runs.train(f"fast-{number}", alike, init=0.0)).seconds for number in range(3)])
    [free] = [what for what in slow.what_if if what.change == "free init"]
    assert slow.what_if[0] == free
    # All of these are times on a machine that others use too.
    assert 2 * 0.3 <= slow.critical_path["init"] * slow.recorded < 2 * 0.6
    assert free.saving * slow.replayed == pytest.approx(slow.critical_path["init"] * slow.recorded, rel=0.3)
    assert free.seconds == pytest.approx(fastest, rel=0.3)
    assert not any(what.change.startswith("dispatch: slots") for what in slow.what_if), "more slots than rollouts save nothing"


async def test_what_staleness_would_save_where_checkpoints_take_long(runs: Runs) -> None:
    """While one is written the next step is trained, and that counts: else it would seem to be for free."""
    write = checkpoint.write

    async def slowly(*arguments: Any) -> Path:
        await asyncio.sleep(1.0)
        return await write(*arguments)

    runs.monkeypatch.setattr(checkpoint, "write", slowly)
    runs.trainer = SlowNotes(gradient_seconds=0.2)
    wide = {"kind": "stream", "init": 12, "run": 24, "reward": 24}
    strict = await planned(await runs.train("strict", wide, {"steps": 4}))
    stale = await planned(await runs.train("stale", wide, {"steps": 4, "staleness": 1}))
    [saved] = [what for what in strict.what_if if what.change == "staleness 1"]
    assert saved.seconds == pytest.approx(stale.recorded, rel=0.2)
    assert abs(stale.error) < 0.15


def test_no_more_groups_are_replaced_than_were() -> None:
    """In the first step as many were as may be, and the next one without gradients was taken. With staleness another step takes
    that one first, and would wait in vain for a group in its place."""

    def group(seconds: float, gave: bool) -> JobGroup:
        job = Job(Work(0.0, 0.0), (Piece("rest", Work(seconds, 0.0)),), Work(0.0, 0.0))
        return JobGroup((job,), 1.0 if gave else 0.0, gave)

    groups = (*(group(3.0, False) for _ in range(REFILLS + 1)), group(0.1, True), group(0.1, True))
    model = Model(groups, tuple(Ending(0.5, 0.0, 0) for _ in range(3)), 1, PLAIN, None, 100)
    strict, stale = (replay(model, StreamDispatch(kind="stream"), staleness) for staleness in (0, 1))
    assert strict == pytest.approx(5 * 3.0 + 0.5 + 2 * (0.1 + 1.0 + 0.5))
    assert 2 * 1.0 + 3 * 0.5 + 2 * 3.0 < stale < strict


async def test_more_slots_are_worth_what_they_turn_out_to_be(runs: Runs) -> None:
    narrow = await planned(await runs.train("narrow", {"kind": "bounded", "slots": 4}, {"steps": 1}))
    wide = read(await runs.train("wide", {"kind": "bounded", "slots": 8}, {"steps": 1}))
    [doubled] = [what for what in narrow.what_if if what.change == "dispatch: slots 4 → 8"]
    assert doubled.seconds == pytest.approx(wide.seconds, rel=0.3)
    assert "waiting to start" in narrow.critical_path


@dataclass(frozen=True)
class Flaky(Sleeper):
    """Its first setup fails."""

    async def setup(self, stack: AsyncExitStack) -> str:
        env = await super().setup(stack)
        if self.diary.events.count("setup") == 1:
            raise InfrastructureError("no sandbox")
        return env


async def test_retries_and_a_run_that_was_killed(runs: Runs) -> None:
    runs.task, runs.trainer = Flaky, SlowNotes(dies_in=1)
    with pytest.raises(KeyboardInterrupt):
        await runs.train("run", BOUNDED | {"backoff": 0.01}, {"steps": 3})
    runs.trainer = SlowNotes()
    await runs.resume("run")
    made = await planned(runs.at / "run")
    assert made.steps == 2
    assert "left out, since the run was interrupted in it: step 2" in made.notes
    assert f"{made.retried} rollouts were tried again; only their last attempt is replayed" in made.notes
    assert made.retried > 0
    assert abs(made.error) < 0.25, "what failed is not replayed"


# --- the command ---------------------------------------------------------------------------------------------------


class Uneven(Sleeper):
    """Some take longer to judge, and every other one has no spread."""

    async def score(self, artifact: JSON, trajectory: Trajectory, stack: AsyncExitStack) -> float:
        number = int(self.id.split("-")[1])
        await asyncio.sleep(0.1 * (number % 3))
        score = await super().score(artifact, trajectory, stack)
        return 1.0 if number % 2 else score


@pytest.mark.parametrize("refill", [False, True])
async def test_of_an_oversampled_step_the_groups_are_replayed_that_it_took(runs: Runs, refill: bool) -> None:
    runs.task = Uneven
    folder = await runs.train("extra", STREAM, {"steps": 5, "oversample": 2.0, "refill": refill})
    steps = read(folder).steps
    assert len(steps) >= 4  # with the wrong groups half of them would seem interrupted; on a busy machine one may
    assert not all(group.gave for step in steps for group in step.groups)
    assert all(len(step.groups) >= 3 for step in steps)


def test_a_group_that_was_complete_before_the_step_began_was_abandoned(tmp_path: Path) -> None:
    """As one is that ends while the step before it updates. That it gave nothing does not tell: others gave nothing either."""
    training = {"steps": 2, "groups": 2, "samples": 2, "oversample": 1.5, "learning_rate": 0.1}
    tasks = {"train": "playing:TRAIN", "heldout": "playing:HELDOUT"}
    run = RunFolder.create(tmp_path / "run", parse({"run": {"folder": "run"}, "tasks": tasks, "training": training}))
    rounds = {"a": (0, 0.0, 4.0), "b": (0, 0.0, 5.0), "abandoned": (1, 1.0, 5.5), "level": (1, 6.0, 10.0), "e": (2, 6.0, 11.0)}
    keys = {task: [Key("train", number, task, index) for index in range(2)] for task, (number, _, _) in rounds.items()}
    with Ledger.open(run.ledger) as ledger:
        for task, (_, begin, end) in rounds.items():
            for key in keys[task]:
                spans = [Span("init", begin, begin + 0.5), Span("run", begin + 0.5, end - 0.5), Span("reward", end - 0.5, end)]
                ledger.record(key, Trajectory(task, key.index, stop="finish", reward=0.0, spans=spans))
        first = StepRecord(0, {}, [*keys["a"], *keys["b"]])
        second = StepRecord(1, {}, keys["e"], [*keys["abandoned"], *keys["level"]])
        ledger.commit_steps([first, second], "step-00002")
    for step in range(2):
        run.append_metrics({"step": step, "seconds": 6.0, "rollout_seconds": 5.0})
    steps = read(run.path).steps
    assert [{group.rollouts[0].task_id for group in step.groups} for step in steps] == [{"a", "b"}, {"level", "e"}]


async def test_the_command_prints_draws_and_writes(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = await runs.train("run", STREAM)
    assert await asyncio.to_thread(main, ["plan", str(folder), "--json", str(tmp_path / "plan.json")]) == 0
    printed = capsys.readouterr().out
    assert "recorded" in printed
    assert "critical path: " in printed
    assert (folder / "plan.png").read_bytes().startswith(b"\x89PNG")
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert {"recorded", "replayed", "error", "critical_path", "busy", "what_if", "retried", "fits", "notes"} <= figures.keys()
    assert [use["resource"] for use in figures["busy"]] == ["init", "run", "sampling", "tools", "reward", "training"]
    assert {"change", "seconds", "saving"} == figures["what_if"][0].keys()

    for name in ("step.svg", "step"):
        elsewhere = tmp_path / name
        assert await asyncio.to_thread(main, ["plan", str(folder), "--picture", str(elsewhere)]) == 0
        assert elsewhere.exists()
    complain = partial(asyncio.to_thread, complaint, capsys)
    assert "no such file or directory" in (await complain(folder, "--picture", str(tmp_path / "no" / "p.png"))).lower()
    assert "not supported" in await complain(folder, "--picture", str(tmp_path / "plan.tea"))

    with sqlite3.connect(folder / "ledger.sqlite") as db:
        db.execute("""UPDATE trajectories SET body = json_set(CAST(body AS TEXT), '$.spans', json('[]'))""")
        db.execute("UPDATE trajectories SET body = CAST(body AS BLOB)")
    assert "its 24 training rollouts have no recorded times" in await complain(folder)
    (folder / "metrics.jsonl").unlink()
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        db.execute("DELETE FROM segments")
        db.execute("DELETE FROM trajectories")
    assert "has no committed training step yet" in await complain(folder)
    (folder / "ledger.sqlite").unlink()
    assert "there is no ledger here" in await complain(folder)
    shutil.rmtree(folder)
    assert "is no run: it has no config.toml" in await complain(folder)


def complaint(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> str:
    assert main(["plan", str(folder), *options]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


# --- fits with a known answer --------------------------------------------------------------------------------------


def test_a_timeline_counts_what_is_under_way() -> None:
    line = Timeline({"a": [(0.0, 4.0), (1.0, 3.0)], "b": [(2.0, 6.0)], "none": []})
    spans = np.array([[0.0, 4.0], [1.0, 3.0], [2.0, 2.0]])
    assert line.mean(line["a"], spans) == pytest.approx([1.5, 2.0, 1.0])
    assert line.integral(line["b"], spans) == pytest.approx([2.0, 1.0, 0.0])
    assert (line.total(line["a"]), line.total(line["none"])) == (6.0, 0.0)


def test_coefficients_are_never_negative() -> None:
    x = np.arange(10.0)
    assert nonnegative([np.ones(10), x], 3 + 2 * x) == pytest.approx([3, 2])
    assert nonnegative([np.ones(10), x], 30 - 2 * x) == pytest.approx([21, 0])
    assert nonnegative([x, 2 * x], 6 * x).sum() > 0, "of two columns that are the same, one is enough"


@pytest.mark.parametrize("cpus", [1, 2, 4])
def test_a_stage_that_computes_is_told_from_one_that_waits(cpus: int) -> None:
    draws = np.random.default_rng(0)
    own, both = draws.uniform(1, 12, 200), draws.uniform(12, 20, 200)
    noise = draws.normal(0, 0.05, 200)
    found = fit_stage(0.5 + 0.3 * np.maximum(1, own / cpus) + noise, own, both, 4)
    assert (found.cpus, found.both) == (cpus, False)
    assert (found.wait, found.work) == (pytest.approx(0.5, abs=0.05), pytest.approx(0.3, abs=0.03))
    assert fit_stage(0.3 * np.maximum(1, both / cpus) + noise, own, both, 4).both
    asleep = fit_stage(0.8 + noise, own, both, 4)
    assert (asleep.work, asleep.wait) == (0.0, pytest.approx(0.8, abs=0.01))
    assert fit_stage(0.8 + 0.002 * own, own, both, 4).work == 0, "a slope that is clear, and does not matter"
    assert fit_stage(np.array([]), np.array([]), np.array([]), 4) == StageFit(0.0)


def test_the_sampler_is_fitted() -> None:
    draws = np.random.default_rng(0)
    output, new, calls = draws.uniform(5, 200, 300), draws.uniform(10, 900, 300), draws.uniform(1, 32, 300)
    seconds = output * (0.02 + 0.001 * calls) + 0.0005 * new
    found = fit_sampler(seconds * draws.normal(1, 0.02, 300), output, new, calls)
    assert (found.token, found.crowd) == (pytest.approx(0.02, rel=0.1), pytest.approx(0.001, rel=0.1))
    assert found.prefill == pytest.approx(0.0005, rel=0.2)
    assert found.r2 > 0.98
    assert found.off < 0.05
    assert found.varied
    assert not fit_sampler(seconds, output, new, np.full(300, 8.0)).varied


# --- the machine ---------------------------------------------------------------------------------------------------

PLAIN = Parts(StageFit(1.0), StageFit(0.0, 1.0, cpus=2), SamplerFit(1.0, 1.0, 1.0, r2=1.0, off=0.0, varied=True), shared=True)


def lasts(work: Any) -> float:
    async def timed() -> float:
        await work(Machine(PLAIN, 8))
        return asyncio.get_running_loop().time()

    return clock.run(timed())


def test_work_takes_longer_in_a_crowd() -> None:
    async def stages(machine: Machine) -> None:
        await asyncio.gather(*(machine.stage("reward", Work(0.5, 1.0)) for _ in range(4)))

    async def calls(machine: Machine) -> None:
        await asyncio.gather(*(machine.sample(Work(1.0, 2.0)) for _ in range(3)))

    async def training_beside_a_call(machine: Machine) -> None:
        await asyncio.gather(machine.sample(Work(1.0, 2.0)), machine.train(1.0))

    async def somebody_else(machine: Machine) -> None:
        await asyncio.gather(machine.sample(Work(0.0, 2.0)), machine.pause(2.0, calls=2))

    assert lasts(stages) == pytest.approx(0.5 + 2.0), "four on two processors"
    assert lasts(calls) == pytest.approx(1.0 + 2.0 * 2), "three calls decode at (1 + 1) / (1 + 3) of the speed of one"
    assert lasts(training_beside_a_call) == pytest.approx(3.0 + 1.0), "each at half its speed, until one has ended"
    assert lasts(somebody_else) == pytest.approx(3.0), "at half its speed while two others are there"


# --- from the machine to a recording and back ----------------------------------------------------------------------

CROWDED = Parts(
    StageFit(0.5, 1.0, cpus=2), StageFit(1.0), SamplerFit(0.02, 0.004, 0.001, r2=1.0, off=0.0, varied=True), shared=False
)


def simulated(slots: int) -> Recording:
    """Sixty rollouts in one step, all of known work, as they would have been recorded on that machine."""
    draws = np.random.default_rng(0)
    amounts = draws.uniform(0.9, 1.1, (60, 2)).tolist()
    tokens = draws.integers(20, 400, (60, 4, 2)).tolist()
    played: list[Played] = []

    async def one(number: int, machine: Machine, slot: asyncio.Semaphore) -> None:
        now = asyncio.get_running_loop().time
        async with slot:
            init, reward = amounts[number]
            began, calls, tools = now(), [], []
            await machine.stage("init", Work(0.5 * init, init))
            ready = now()
            for output, new in tokens[number]:
                asked = now()
                await machine.sample(Work(0.001 * new, 0.024 * output))
                calls.append(Call((asked, now()), output, new))
                await asyncio.sleep(0.3)
                tools.append((calls[-1].time[1], now()))
            ended = now()
            await machine.stage("reward", Work(reward, 0.0))
            stages = ((began, ready), (ready, ended), (ended, now()))
            played.append(Played(0, f"{number // 6}", 0, True, began, 1, *stages, tuple(calls), tuple(tools)))

    async def all_of_them() -> float:
        machine, slot = Machine(CROWDED, 60), asyncio.Semaphore(slots)
        await asyncio.gather(*(one(number, machine, slot) for number in range(60)))
        return asyncio.get_running_loop().time()

    end = clock.run(all_of_them())
    groups = tuple(PlayedGroup(tuple(each for each in played if each.task_id == f"{group}")) for group in range(10))
    step = Step(0, groups, 0.0, end, end + 2.0, end + 2.0, ())
    values = {
        "run": {"folder": "run"},
        "tasks": {"heldout": "playing:TRAIN"},
        "backend": {"kind": "scripted", "script": "playing:play", "model": "none"},
        "training": {"steps": 1, "groups": 10, "samples": 6, "learning_rate": 0.1},
        "dispatch": {"kind": "bounded", "slots": slots},
    }
    config = parse(values)
    assert config.training is not None
    return Recording(config, config.training, (step,), ())


def test_a_machine_is_found_again_in_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    narrow, wide = simulated(6), simulated(20)
    model = model_of(narrow)
    sampler = model.parts.sampler
    assert (model.parts.init.cpus, model.parts.reward.work) == (2, 0.0)
    assert (sampler.token, sampler.crowd) == (pytest.approx(0.02, rel=0.03), pytest.approx(0.004, rel=0.03))
    assert replay(model, narrow.config.dispatch, 0) == pytest.approx(narrow.seconds, rel=0.03)
    assert replay(model, wide.config.dispatch, 0) == pytest.approx(wide.seconds, rel=0.03), "slots that it has never seen"
    assert narrow.seconds > 1.2 * wide.seconds, "else it would prove nothing"
