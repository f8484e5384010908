"""The training loop with a trainer that only takes notes: what it does in which order, how it stops, and how it goes on."""

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playing import Dice, Probe

from palestra import training
from palestra.backends.opening import Opened
from palestra.config import Config, Loss, parse
from palestra.errors import ConfigError, PalestraError
from palestra.ledger import Ledger
from palestra.protocols import Renderer
from palestra.report import Reporter
from palestra.runs import RunFolder
from palestra.trajectory import Sample


@dataclass
class Notes:
    """A trainer whose weights are the number of its updates."""

    updates: int = 0
    version: int = 0
    pending: list[Sample] = field(default_factory=list)
    trained: list[list[Sample]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    discarded: int = 0
    exported: dict[str, list[int]] = field(default_factory=dict)
    dies_in: int | None = None
    """The update that it does not survive."""

    async def accumulate(self, samples: Sequence[Sample], loss: Loss) -> None:
        self.pending += samples

    async def step(self, learning_rate: float) -> dict[str, float]:
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
        self.version = self.updates
        return self.version

    async def logprobs(self, samples: Sequence[Sample], temperature: float) -> list[list[float]]:
        raise NotImplementedError

    async def save(self, folder: Path) -> None:
        (folder / "updates").write_text(str(self.updates))

    async def load(self, folder: Path) -> None:
        self.updates = self.version = int((folder / "updates").read_text())

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
        return parse({"run": {"folder": str(self.folder)}, "tasks": tasks, "training": plan, "evaluation": evaluation})

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.folder)

    async def train(self, stopping: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        reporter = Reporter(self.config, self.run, quiet=True)
        return await training.train(self.config, self.run, reporter, stopping)

    @asynccontextmanager
    async def open_backend(self, config: Config, training: bool) -> AsyncIterator[Opened]:
        sampler = Dice(self.renderer)
        try:
            yield Opened(sampler, self.renderer, self.trainer)
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


def ask_to_stop(hall: Hall, updates: int) -> Callable[[], bool]:
    """True from when a few rollouts have begun after so many updates."""
    asked = 0

    def stopping() -> bool:
        nonlocal asked
        asked += hall.trainer.updates == updates
        return asked > 3

    return stopping


async def test_a_stop_in_a_step_saves_and_goes_on_later(hall: Hall) -> None:
    hall.settings = {"evaluation": {"every": 0, "greedy": False}, "training": {"save_every": 3}}
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


async def test_shuffled_rewards_are_the_steps_own_dealt_out_anew(hall: Hall) -> None:
    hall.settings = {"evaluation": {"every": 0}}
    await hall.train()
    plain = [row["reward"] for row in hall.run.read_metrics() if "evaluation" not in row]
    other = Hall(hall.folder.with_name("shuffled"), hall.renderer, {"training": {"shuffle_rewards": True}} | hall.settings)
    RunFolder.create(other.folder, other.config)
    training.open_backend = other.open_backend  # type: ignore[assignment]  # the fixture puts it back
    await other.train()
    assert [row["reward"] for row in other.run.read_metrics() if "evaluation" not in row] == plain
    assert [[s.advantage for s in step] for step in other.trainer.trained] != [
        [s.advantage for s in step] for step in hall.trainer.trained
    ]
