"""A supervised warm start: conversations from a JSONL file, or the successes of another run's ledger, as training samples."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from palestra.config import Loss, WarmStart
from palestra.errors import ConfigError
from palestra.ledger import Ledger
from palestra.message import from_json
from palestra.protocols import Renderer, Trainer
from palestra.render import conversation
from palestra.report import Reporter
from palestra.trajectory import Sample

SQLITE = b"SQLite format 3\0"


async def warm_start(section: WarmStart, trainer: Trainer, renderer: Renderer, reporter: Reporter) -> None:
    """Some steps of cross-entropy, before RL."""
    samples = load_samples(section, renderer)
    chance = random.Random(0)
    for step in range(section.steps):
        batch = chance.sample(samples, min(section.batch, len(samples)))
        await trainer.accumulate(batch, Loss(kind="cross_entropy"))
        metrics = await trainer.step(section.learning_rate)
        reporter.warm_start(step, section.steps, metrics["loss"])
    await trainer.publish()


def load_samples(section: WarmStart, renderer: Renderer) -> list[Sample]:
    path = section.data / "ledger.sqlite" if section.data.is_dir() else section.data
    if not path.is_file():
        raise ConfigError(f"warm_start.data = {str(section.data)!r}: no such file; give a JSONL file or the folder of a run")
    with path.open("rb") as file:
        is_ledger = file.read(len(SQLITE)) == SQLITE
    samples = list(_from_ledger(path, section.min_reward) if is_ledger else _from_jsonl(path, renderer))
    if not samples:
        raise ConfigError(f"warm_start.data = {str(section.data)!r} gives no samples")
    return samples


def _from_ledger(path: Path, min_reward: float) -> Iterator[Sample]:
    """The tokens as they were sampled, not rendered anew."""
    with Ledger.open(path, read_only=True) as ledger:
        for row in ledger.trajectories(min_reward=min_reward):
            for segment in row.trajectory.segments:
                yield Sample(segment.tokens, segment.mask, segment.logprobs, segment.versions, 0.0)


def _from_jsonl(path: Path, renderer: Renderer) -> Iterator[Sample]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            messages = [from_json(message) for message in row["messages"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}: not a JSON object with `messages`: {error!r}") from None
        tokens, mask = conversation.encode(renderer, messages, row.get("tools") or [])
        yield Sample(tokens, mask, [0.0] * len(tokens), [-1] * len(tokens), 0.0)
