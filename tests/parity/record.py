"""Makes recorded.json, for which nothing but the embedded backend is needed: `python tests/parity/record.py`.

One step is trained on six tasks. What was sampled is kept, what the model would say of it after the step, and what advantages and
losses the embedded backend finds.
"""

import asyncio
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from parity.errands import RECIPE
from parity.recorded import FILE, LOSSES, MASKED, credited, embedded_loss, name_of

from palestra import config, train
from palestra.backends.torch.opening import open_torch
from palestra.config import Torch
from palestra.ledger import Ledger
from palestra.trajectory import Group, Sample, Segment, Trajectory


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        model, run = Path(scratch) / "model", Path(scratch) / "run"
        _make_model(model)
        words = [f"backend.model={model}", f"run.folder={run}", f"tasks.folder={FILE.parent}", "tasks.train=errands:tasks"]
        words += ["tasks.heldout=errands:others", "agent.turns=2", f"training.masked_stops={json.dumps(sorted(MASKED))}"]
        words += ["training.steps=1", "training.groups=6", "training.samples=4", "dispatch.retries=0", "run.seed=2"]
        train(RECIPE / "train.toml", *words, quiet=True)
        with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
            groups = _groups([row.trajectory for row in ledger.trajectories(phase="train")])
        samples = credited(groups)
        now = asyncio.run(_logprobs(model, run / "adapter", samples))
    losses = {name_of(loss): embedded_loss(samples, now, loss) for loss in LOSSES}
    written = {
        "groups": [[_trajectory(trajectory) for trajectory in group.trajectories] for group in groups],
        "advantages": [sample.advantage for sample in samples],
        "now": now,
        "losses": {name: {"loss": value, "gradient": gradient} for name, (value, gradient) in losses.items()},
    }
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in written.items())
    FILE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def _make_model(folder: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_model", RECIPE / "make_model.py")
    assert spec is not None
    assert spec.loader is not None
    making = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(making)
    making.make(folder)


def _groups(trajectories: list[Trajectory]) -> list[Group]:
    """With logprobs as the file will have them."""
    for segment in (segment for trajectory in trajectories for segment in trajectory.segments):
        segment.logprobs = [round(value, 6) for value in segment.logprobs]
    names = sorted({trajectory.task_id for trajectory in trajectories})
    attempts = {name: sorted((t for t in trajectories if t.task_id == name), key=lambda t: t.index) for name in names}
    return [Group(name, tuple(attempts[name])) for name in names]


def _trajectory(trajectory: Trajectory) -> dict[str, object]:
    kept = {"task": trajectory.task_id, "index": trajectory.index, "stop": trajectory.stop, "reward": trajectory.reward}
    return {**kept, "segments": [_segment(segment) for segment in trajectory.segments]}


def _segment(segment: Segment) -> dict[str, object]:
    logprobs = [value if sampled else None for value, sampled in zip(segment.logprobs, segment.mask, strict=True)]
    return {"tokens": segment.tokens, "logprobs": logprobs}


async def _logprobs(model: Path, adapter: Path, samples: list[Sample]) -> list[list[float]]:
    """Of the sampled tokens."""
    settings = config.load(RECIPE / "train.toml")
    section = Torch(model=str(model), dtype="float32", threads=1, adapter=adapter)
    async with open_torch(settings, section, training=True) as (_, _, trainer):
        assert trainer is not None
        everywhere = await trainer.logprobs(samples, 1.0)
    return [
        [round(value, 6) for value, sampled in zip(logprobs, sample.mask, strict=True) if sampled]
        for logprobs, sample in zip(everywhere, samples, strict=True)
    ]


if __name__ == "__main__":
    main()
