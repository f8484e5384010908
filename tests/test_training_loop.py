"""The training loop with a trainer that only takes notes: what it does in which order, how it stops, and how it goes on."""

import asyncio
import contextlib
import json
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playing import Diary, Dice, Probe

from palestra import training
from palestra.backends.opening import Opened
from palestra.config import Config, Loss, parse
from palestra.errors import ConfigError, InfrastructureError, PalestraError
from palestra.learner import REFILLS
from palestra.ledger import Ledger
from palestra.message import JSON
from palestra.policy import TokenPolicies
from palestra.protocols import Renderer
from palestra.report import Reporter
from palestra.runs import RunFolder
from palestra.trajectory import Sample, Trajectory


@dataclass
class Notes:
    """A trainer whose weights are the number of its updates."""

    updates: int = 0
    version: int = 0
    published: int = 0
    """How often before the first step, as a warm start does."""
    pending: list[Sample] = field(default_factory=list)
    trained: list[list[Sample]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    discarded: int = 0
    exported: dict[str, list[int]] = field(default_factory=dict)
    dies_in: int | None = None
    """The update that it does not survive."""
    ages: set[int] = field(default_factory=set)
    """By how many versions the tokens were behind the weights that they trained."""
    seconds: float = 0.0
    """How long an update takes."""
    publish_seconds: float = 0.0
    publishing: bool = False
    meanwhile: int = 0
    """Samples that it took while it published."""

    async def accumulate(self, samples: Sequence[Sample], loss: Loss) -> None:
        self.pending += samples
        self.meanwhile += len(samples) if self.publishing else 0
        weights = self.version + self.publishing
        self.ages |= {weights - version for sample in samples for version in sample.versions if version >= 0}

    async def step(self, learning_rate: float) -> dict[str, float]:
        assert not self.publishing, "the weights that are published stay as they are"
        await asyncio.sleep(self.seconds)
        if self.updates == self.dies_in:
            raise KeyboardInterrupt
        self.updates += 1
        self.rates.append(learning_rate)
        self.trained.append(self.pending)
        self.pending = []
        return {"loss": 0.5}

    async def discard(self) -> None:
        self.discarded += 1
        self.pending = []

    async def publish(self) -> int:
        self.publishing = True
        await asyncio.sleep(self.publish_seconds)
        self.publishing = False
        self.version += 1
        return self.version

    async def logprobs(self, samples: Sequence[Sample], temperature: float) -> list[list[float]]:
        raise NotImplementedError

    async def save(self, folder: Path) -> None:
        (folder / "updates").write_text(f"{self.updates} {self.version}")

    async def load(self, folder: Path) -> None:
        self.updates, self.version = map(int, (folder / "updates").read_text().split())

    async def export(self, folder: Path) -> None:
        self.exported.setdefault(folder.name, []).append(self.updates)


TRAIN = [Probe(f"train-{number}") for number in range(5)]
HELDOUT = [Probe(f"held-{number}") for number in range(4)]


EVERYTHING = 4 * 4 * 2 + 3 * 2 * 4
"""The rollouts of a run: four evaluations and three steps."""


@dataclass
class Hall:
    """A run with its trainer and sampler. `train` may be called again, with another trainer: a run that goes on."""

    folder: Path
    renderer: Renderer
    settings: dict[str, Any] = field(default_factory=dict)
    trainer: Notes = field(default_factory=Notes)
    sampled: int = 0

    @property
    def config(self) -> Config:
        plan = {"steps": 3, "groups": 2, "samples": 4, "learning_rate": 0.1} | self.settings.get("training", {})
        evaluation = {"samples": 2, "every": 1, "greedy": False} | self.settings.get("evaluation", {})
        tasks = {"train": "playing:TRAIN", "heldout": "playing:HELDOUT"} | self.settings.get("tasks", {})
        sections = {"tasks": tasks, "training": plan, "evaluation": evaluation, "dispatch": self.settings.get("dispatch", {})}
        return parse({"run": {"folder": str(self.folder)}, **sections})

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.folder)

    async def train(self, stopping: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        reporter = Reporter(self.config, self.run, quiet=True)
        return await training.train(self.config, self.run, reporter, stopping)

    @asynccontextmanager
    async def open_backend(self, config: Config, training: bool) -> AsyncIterator[Opened]:
        sampler = Dice(self.renderer, version=lambda: self.trainer.version)
        try:
            yield Opened(TokenPolicies(sampler, self.renderer), self.renderer, self.trainer)
        finally:
            self.sampled += len(sampler.seeds)

    def ledger(self) -> Ledger:
        return Ledger.open(self.run.ledger, read_only=True)


@pytest.fixture
def hall(tmp_path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hall]:
    made = Hall(tmp_path / "run", renderer)
    RunFolder.create(made.folder, made.config)
    monkeypatch.setattr(training, "open_backend", made.open_backend)
    monkeypatch.setattr("playing.TRAIN", TRAIN, raising=False)
    monkeypatch.setattr("playing.HELDOUT", HELDOUT, raising=False)
    yield made
    if made.run.ledger.exists():
        with made.ledger() as ledger:
            assert ledger.verify() == []


def evaluations(hall: Hall) -> dict[int, float]:
    return {row["step"]: row["pass@1"]["value"] for row in hall.run.read_metrics() if row.get("evaluation") == "sampled"}


async def test_a_run_from_beginning_to_end(hall: Hall) -> None:
    summary = await hall.train()
    assert (summary["steps"], hall.trainer.version, hall.trainer.discarded) == (3, 3, 0)
    assert hall.sampled == EVERYTHING
    assert all(samples for samples in hall.trainer.trained)
    assert sorted(evaluations(hall)) == [0, 1, 2, 3]
    assert (summary["base"], summary["final"]) == (evaluations(hall)[0], evaluations(hall)[3])
    assert hall.trainer.exported["adapter"] == [3]
    assert json.loads(hall.run.summary.read_text()) == json.loads(json.dumps(summary))
    assert hall.run.curve.stat().st_size > 1000
    with hall.ledger() as ledger:
        assert ledger.committed_step() == 2
        assert set(ledger.counts()["train"]) <= {"consumed", "filtered"}


async def test_the_best_policy_is_the_one_exported(hall: Hall) -> None:
    summary = await hall.train()
    found = evaluations(hall)
    best = max(found, key=lambda step: (found[step], -step))
    assert (summary["best"]["success"], summary["best"]["step"]) == (found[best], best)
    assert hall.trainer.exported["best"][-1] == best, "the weights at hand after that many updates"


async def test_a_run_that_goes_on_keeps_the_best_policy_of_before(hall: Hall) -> None:
    hall.trainer.dies_in = 2
    with pytest.raises(KeyboardInterrupt):
        await hall.train()
    found = evaluations(hall)
    before = max(found, key=lambda step: (found[step], -step))
    hall.trainer = Notes()
    summary = await hall.train()
    found = evaluations(hall)
    best = max(found, key=lambda step: (found[step], -step))
    assert (summary["best"]["success"], summary["best"]["step"]) == (found[best], best)
    assert hall.trainer.exported.get("best", []) == ([best] if best > before else []), "never weights under another's name"


async def test_a_run_that_was_killed_goes_on_as_if_nothing_had_happened(hall: Hall) -> None:
    hall.trainer.dies_in = 1
    with pytest.raises(KeyboardInterrupt):
        await hall.train()
    with hall.ledger() as ledger:
        assert ledger.committed_step() == 0
        known = len(ledger.finished("train", 1))
    assert known == 8, "what the dead step had sampled"
    hall.trainer = Notes()
    summary = await hall.train()
    assert summary["steps"] == 3
    assert hall.trainer.updates == 3
    assert len(hall.trainer.trained) == 2, "the first step is in the checkpoint, and not trained again"
    assert hall.sampled == EVERYTHING, "nothing was sampled twice"


@pytest.mark.parametrize("save_every", [1, 2, 3])
async def test_every_step_and_evaluation_is_reported_once(hall: Hall, save_every: int) -> None:
    """However often the run is killed: what it does again replaces what it had said of it."""
    hall.settings = {"training": {"save_every": save_every}}
    for update in (2, 1, 2):
        hall.trainer = Notes(dies_in=update)
        with contextlib.suppress(KeyboardInterrupt):
            await hall.train()
    hall.trainer = Notes()
    await hall.train()
    rows = Counter((row["step"], row.get("evaluation")) for row in hall.run.read_metrics())
    assert rows == Counter([(step, None) for step in range(3)] + [(step, "sampled") for step in range(4)])


def ask_to_stop(hall: Hall, updates: int) -> Callable[[], bool]:
    """True from when a few rollouts have begun after so many updates."""
    asked = 0

    def stopping() -> bool:
        nonlocal asked
        asked += hall.trainer.updates == updates
        return asked > 3

    return stopping


async def test_a_stop_in_a_step_saves_and_goes_on_later(hall: Hall) -> None:
    hall.settings = {
        "evaluation": {"every": 0, "greedy": False},
        "training": {"save_every": 3},
        "dispatch": {"kind": "bounded", "slots": 2},
    }
    summary = await hall.train(ask_to_stop(hall, updates=1))
    assert summary == {"stopped": True, "steps": 1}
    assert (hall.trainer.discarded, hall.run.summary.exists()) == (1, False)
    with hall.ledger() as ledger:
        assert ledger.committed_step() == 0, "the step that was complete is saved, whatever save_every says"
        assert 0 < len(ledger.finished("train", 1)) < 8
    hall.trainer = Notes()
    assert (await hall.train())["steps"] == 3
    assert hall.trainer.updates == 3
    assert hall.sampled == 2 * 4 * 2 + 3 * 2 * 4


@pytest.mark.parametrize("after", [0, 3])
async def test_a_stop_in_an_evaluation_reports_no_half_of_it(hall: Hall, after: int) -> None:
    hall.settings = {"evaluation": {"every": 0, "greedy": True}}
    summary = await hall.train(ask_to_stop(hall, updates=after))
    assert summary == {"stopped": True, "steps": after}
    assert after not in evaluations(hall)
    assert not hall.run.summary.exists()
    summary = await hall.train()
    assert summary["evaluations"]["final"]["sampled"]["stops"] == {"finish": 8}
    assert summary["evaluations"]["base"]["greedy"]["stops"] == {"finish": 4}
    assert hall.trainer.updates == 3


async def test_more_steps_than_an_epoch_holds(hall: Hall) -> None:
    """Five tasks, four to a step: no step may straddle two epochs and take a task twice."""
    hall.settings = {"training": {"steps": 4, "groups": 4, "samples": 2}, "evaluation": {"every": 0}}
    summary = await hall.train()
    assert summary["steps"] == 4
    with hall.ledger() as ledger:
        for step in range(4):
            rows = [row.key for row in ledger.trajectories(phase="train", step=step)]
            assert len({key.task_id for key in rows}) == 4
            assert len(rows) == 8


async def test_more_groups_than_tasks_are_refused_before_anything_begins(hall: Hall) -> None:
    hall.settings = {"training": {"groups": 6}}
    with pytest.raises(ConfigError, match=r"training\.groups = 6 is more than the 5 tasks of tasks\.train"):
        await hall.train()
    assert not hall.run.ledger.exists()


async def test_a_step_in_which_everything_fails_ends_the_run(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [Probe(f"bad-{number}", breaks={"look": RuntimeError("a bug")}) for number in range(5)]
    monkeypatch.setattr("playing.TRAIN", broken)
    with pytest.raises(
        PalestraError, match=r"every rollout of step 0 failed; the first: run failed \(bug\): RuntimeError: a bug"
    ):
        await hall.train()
    assert hall.trainer.updates == 0


async def test_the_learning_rate_warms_up(hall: Hall) -> None:
    hall.settings = {"training": {"warmup_steps": 2}, "evaluation": {"every": 0}}
    await hall.train()
    assert hall.trainer.rates == pytest.approx([0.05, 0.1, 0.1])


async def test_shuffled_rewards_are_each_groups_own_dealt_out_anew(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    hall.settings = {"evaluation": {"every": 0}}
    await hall.train()
    plain = [row["reward"] for row in hall.run.read_metrics() if "evaluation" not in row]
    other = Hall(hall.folder.with_name("shuffled"), hall.renderer, {"training": {"shuffle_rewards": True}} | hall.settings)
    RunFolder.create(other.folder, other.config)
    monkeypatch.setattr(training, "open_backend", other.open_backend)
    await other.train()
    assert [row["reward"] for row in other.run.read_metrics() if "evaluation" not in row] == plain
    dealt, earned = ([[(s.task_id, s.advantage) for s in step] for step in h.trainer.trained] for h in (other, hall))
    assert dealt != earned
    assert [sorted(step) for step in dealt] == [sorted(step) for step in earned]


# Ahead of the trainer


def steps(hall: Hall) -> list[dict[str, Any]]:
    return [row for row in hall.run.read_metrics() if "evaluation" not in row]


def states(hall: Hall) -> Counter[str]:
    with hall.ledger() as ledger:
        return Counter(row.state for row in ledger.trajectories(phase="train"))


def identity(sample: Sample) -> tuple[str, tuple[float, ...]]:
    """No two attempts draw the same logprobs."""
    return sample.task_id, tuple(sample.logprobs)


QUIET = {"every": 0, "greedy": False, "samples": 1}
EVALUATED = 2 * 4
"""Rollouts of two quiet evaluations."""


@pytest.mark.parametrize("publish_seconds", [0.0, 0.05])
@pytest.mark.parametrize("staleness", [1, 2])
async def test_stale_groups_are_trained_with_the_versions_that_wrote_them(
    hall: Hall, staleness: int, publish_seconds: float
) -> None:
    hall.settings = {"training": {"steps": 6, "staleness": staleness}, "evaluation": QUIET}
    hall.trainer.seconds, hall.trainer.publish_seconds = 0.005, publish_seconds
    await hall.train()
    assert hall.trainer.meanwhile > 0 or not publish_seconds
    assert (hall.trainer.updates, hall.sampled) == (6, 6 * 2 * 4 + EVALUATED), "nothing is begun for a step that will not come"
    assert hall.trainer.ages <= set(range(staleness + 1))
    assert max(hall.trainer.ages) >= 1
    found = [row["staleness"] for row in steps(hall)]
    assert found[0] == 0
    assert 0 < max(found) <= staleness
    trained = [identity(sample) for step in hall.trainer.trained for sample in step]
    assert len(trained) == len(set(trained)), "nothing is trained on twice"
    assert states(hall).keys() <= {"consumed", "filtered"}
    with hall.ledger() as ledger:
        assert {row.key.step for row in ledger.trajectories(phase="train")} == set(range(6)), "the rounds of the plan"


async def test_an_error_in_the_next_step_does_not_lose_the_one_that_is_published(hall: Hall) -> None:
    class Short(Notes):
        async def accumulate(self, samples: Sequence[Sample], loss: Loss) -> None:
            if self.publishing:
                raise MemoryError("of the next step")
            await super().accumulate(samples, loss)

    hall.settings = {"training": {"steps": 4, "staleness": 1}, "evaluation": QUIET}
    hall.trainer = Short(publish_seconds=0.05)
    with pytest.raises(MemoryError, match="of the next step"):
        await hall.train()
    with hall.ledger() as ledger:
        assert ledger.committed_step() == hall.trainer.updates - 1 >= 0


async def test_a_stop_in_an_evaluation_forgets_what_the_next_step_has(hall: Hall) -> None:
    hall.settings = {"training": {"steps": 4, "staleness": 1}, "evaluation": {"every": 1}}
    hall.trainer.publish_seconds = 0.05
    asked = False

    def stopping() -> bool:
        nonlocal asked
        asked = asked or (hall.trainer.version == 1 and bool(hall.trainer.pending))
        return asked

    summary = await hall.train(stopping)
    assert summary["stopped"]
    assert hall.trainer.pending == []
    await hall.train()
    assert hall.trainer.updates == 4


async def test_on_policy_every_token_is_of_the_weights_that_it_trains(hall: Hall) -> None:
    hall.trainer.publish_seconds = 0.05
    await hall.train()
    assert hall.trainer.ages == {0}
    assert hall.trainer.meanwhile == 0
    assert all("staleness" not in row for row in steps(hall))


@pytest.mark.parametrize("dispatch", ["batch", "bounded", "pipeline", "stream"])
@pytest.mark.parametrize("dies_in", [1, 3])
async def test_a_stale_run_that_was_killed_trains_nothing_twice(hall: Hall, dispatch: str, dies_in: int) -> None:
    hall.settings = {"training": {"steps": 5, "staleness": 1}, "evaluation": QUIET, "dispatch": {"kind": dispatch}}
    dead = hall.trainer
    await die(hall, dies_in)
    before = recorded(hall)
    await hall.train()
    assert hall.trainer.updates == 5
    after = recorded(hall)
    assert all(after[key] == trajectory for key, trajectory in before.items()), "what was sampled is kept"
    trained = [identity(sample) for step in (*dead.trained, *hall.trainer.trained) for sample in step]
    assert len(trained) == len(set(trained))
    assert dead.ages | hall.trainer.ages <= {0, 1}
    assert states(hall).keys() <= {"consumed", "filtered"}
    assert states(hall).total() == 5 * 2 * 4
    assert [row["step"] for row in steps(hall)] == list(range(5)), "each step is reported once"


def recorded(hall: Hall) -> dict[Any, Any]:
    with hall.ledger() as ledger:
        return {row.key: row.trajectory for row in ledger.trajectories()}


async def die(hall: Hall, update: int) -> None:
    """Train up to an update that is not survived, and go on with another trainer."""
    hall.trainer.dies_in, hall.trainer.seconds = update, 0.03  # in which the next step's rollouts come to their end
    with pytest.raises(KeyboardInterrupt):
        await hall.train()
    hall.trainer = Notes(published=hall.trainer.published)


@pytest.mark.parametrize("published", [0, 1])
async def test_a_group_that_was_cut_in_two_is_trained_in_time(
    hall: Hall, published: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a warm start, which is published too: versions are not steps."""
    monkeypatch.setattr("playing.TRAIN", [Spread(f"task-{number}") for number in range(5)])
    hall.settings = {"training": {"steps": 5, "groups": 1, "samples": 2, "staleness": 1}, "evaluation": QUIET}
    hall.trainer = Notes(version=published, published=published)
    await die(hall, update=1)
    with Ledger.open(hall.run.ledger) as ledger:
        [cut] = {row.key.task_id for row in ledger.trajectories(phase="train", step=1)}
    with sqlite3.connect(hall.run.ledger) as db:  # as if it had been killed a little earlier
        lost = "phase = 'train' AND step = 1 AND idx = 1"
        db.execute(f"DELETE FROM segments WHERE trajectory IN (SELECT id FROM trajectories WHERE {lost})")
        db.execute(f"DELETE FROM trajectories WHERE {lost}")
    db.close()
    slow = [Slow(f"task-{n}", seconds=0.3) if f"task-{n}" == cut else Spread(f"task-{n}") for n in range(5)]
    monkeypatch.setattr("playing.TRAIN", slow)
    await hall.train()
    assert hall.trainer.updates == 5
    assert hall.trainer.ages <= {0, 1}


async def test_after_steps_without_an_update_a_resumed_run_drops_nothing(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without a gradient publish nothing, so the versions in the ledger stay behind the number of steps."""

    class Late(Spread):
        async def score(self, artifact: JSON, trajectory: Trajectory, stack: AsyncExitStack) -> float:
            return float(trajectory.index % 2) if len(steps(hall)) > 3 else 0.0

    monkeypatch.setattr("playing.TRAIN", [Late(f"late-{number}") for number in range(5)])
    hall.settings = {"training": {"steps": 10, "staleness": 1}, "evaluation": QUIET}
    await die(hall, update=1)
    assert len(steps(hall)) > 3, "some gave no gradient"
    await hall.train()
    flat = sum(row["groups_without_spread"] for row in steps(hall))
    assert states(hall) == {"filtered": 4 * flat, "consumed": 4 * (10 * 2 - flat)}, "every group that teaches was trained on"


# Dynamic sampling


class Flat(Probe):
    """Nobody can solve it."""

    async def score(self, artifact: JSON, trajectory: Trajectory, stack: AsyncExitStack) -> float:
        return 0.0


class Spread(Probe):
    """Every other attempt succeeds."""

    async def score(self, artifact: JSON, trajectory: Trajectory, stack: AsyncExitStack) -> float:
        return float(trajectory.index % 2)


@pytest.mark.parametrize("staleness", [0, 1])
async def test_refill_replaces_groups_without_a_gradient(hall: Hall, staleness: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = [Spread("a"), Flat("b"), Flat("c"), Spread("d"), Flat("e")]
    monkeypatch.setattr("playing.TRAIN", mixed)
    hall.settings = {"training": {"refill": True, "staleness": staleness}, "evaluation": QUIET}
    await hall.train()
    for row in steps(hall):
        assert row["groups_trained"] == 2, "each step is full of groups that teach"
        assert row["groups_replaced"] == row["groups_without_spread"]
    assert sum(row["groups_replaced"] for row in steps(hall)) > 0
    assert [len(step) for step in hall.trainer.trained] == [2 * 4] * 3
    assert {sample.task_id for step in hall.trainer.trained for sample in step} == {"a", "d"}
    replaced = sum(row["groups_replaced"] for row in steps(hall))
    assert states(hall)["consumed"] == 3 * 2 * 4
    assert states(hall)["filtered"] == replaced * 4
    if not staleness:
        # What began in the place of a replaced group, and came too late for the last step, is left as it is.
        assert states(hall).keys() <= {"consumed", "filtered", "finished"}


async def test_refill_gives_up_where_nothing_teaches(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("playing.TRAIN", [Flat(f"flat-{number}") for number in range(5)])
    hall.settings = {"training": {"refill": True, "steps": 2}, "evaluation": QUIET}
    summary = await asyncio.wait_for(hall.train(), 30)
    assert (summary["steps"], hall.trainer.updates) == (2, 0)
    assert [row["groups_replaced"] for row in steps(hall)] == [REFILLS * 2] * 2
    assert [row["groups_trained"] for row in steps(hall)] == [0, 0]


async def test_a_run_with_refill_that_was_killed_trains_nothing_twice(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = [Spread("a"), Flat("b"), Flat("c"), Spread("d"), Flat("e")]
    monkeypatch.setattr("playing.TRAIN", mixed)
    hall.settings = {"training": {"refill": True, "steps": 4}, "evaluation": QUIET}
    dead = hall.trainer
    await die(hall, update=2)
    before = recorded(hall)
    await hall.train()
    after = recorded(hall)
    assert all(after[key] == trajectory for key, trajectory in before.items())
    trained = [identity(sample) for step in (*dead.trained, *hall.trainer.trained) for sample in step]
    assert len(trained) == len(set(trained)) == 4 * 2 * 4
    assert [row["groups_trained"] for row in steps(hall)] == [2] * 4


# Oversampling


@dataclass(frozen=True)
class Slow(Spread):
    """Looks around for longer than anybody waits."""

    seconds: float = 20.0

    def tools(self, env: str) -> Sequence[Callable[..., object]]:
        look, *others = super().tools(env)

        async def slowly(at: str) -> object:
            """Look."""
            await asyncio.sleep(self.seconds)
            return look(at)

        slowly.__name__ = "look"
        return [slowly, *others]


async def test_oversample_abandons_what_a_full_step_does_not_wait_for(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    diary = Diary()
    monkeypatch.setattr("playing.TRAIN", [Spread("a", diary), Slow("b", diary), Spread("c", diary), Slow("d", diary)])
    hall.settings = {"training": {"oversample": 2.0, "steps": 4, "groups": 2}, "evaluation": QUIET}
    await asyncio.wait_for(hall.train(), 15)
    assert [row["groups_trained"] for row in steps(hall)] == [2] * 4
    assert {sample.task_id for step in hall.trainer.trained for sample in step} == {"a", "c"}
    assert hall.trainer.ages == {0}
    assert [row["groups_abandoned"] for row in steps(hall)] == [2] * 4
    # What was abandoned had written only its first turn, so those that were kept are the longer ones here.
    assert min(row["length_bias"] for row in steps(hall)) > 1.2
    assert diary.open == 0
    with hall.ledger() as ledger:
        rows = list(ledger.trajectories(phase="train"))
    assert {row.key.task_id for row in rows} == {"a", "c"}, "an abandoned attempt is not recorded"
    assert states(hall)["consumed"] == 4 * 2 * 4


async def test_without_oversampling_nothing_is_said_of_it(hall: Hall) -> None:
    await hall.train()
    assert all(row.keys().isdisjoint({"length_bias", "groups_abandoned", "groups_replaced"}) for row in steps(hall))


# Failures


async def test_what_was_retried_and_what_failed_is_counted(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: Counter[str] = Counter()

    class Shaky(Spread):
        async def setup(self, stack: AsyncExitStack) -> str:
            tries[self.id] += 1
            if tries[self.id] == 1 or self.id == "lost":
                raise InfrastructureError("no sandbox")
            return await super().setup(stack)

    monkeypatch.setattr("playing.TRAIN", [Shaky("a"), Shaky("lost")])
    hall.settings = {"training": {"steps": 1}, "evaluation": QUIET, "dispatch": {"retries": 1, "backoff": 0.0}}
    await hall.train()
    [row] = steps(hall)
    assert (row["failed"], row["retried"]) == (4, 1 + 4)
    assert (row["groups_trained"], row["groups_too_small"]) == (1, 1)
    assert states(hall) == {"consumed": 4, "failed": 4}
    with hall.ledger() as ledger:
        assert ledger.settled() == {(0, "a"), (0, "lost")}, "a run that goes on does not try them again"
