"""A supervised warm start: conversations from a JSONL file, or the successes of another run's ledger, as training samples."""

import json
import random
from collections.abc import Collection, Iterator
from pathlib import Path

from palestra.config import Loss, WarmStart
from palestra.errors import ConfigError, ModelError
from palestra.ledger import Ledger
from palestra.message import from_json
from palestra.protocols import Renderer, Trainer
from palestra.render import conversation
from palestra.report import Reporter
from palestra.trajectory import Sample

SQLITE = b"SQLite format 3\0"


async def warm_start(
    section: WarmStart, trainer: Trainer, renderer: Renderer, reporter: Reporter, heldout: Collection[str] = ()
) -> None:
    """Some steps of cross-entropy, before RL."""
    samples = load_samples(section, renderer, heldout)
    chance = random.Random(0)
    for step in range(section.steps):
        batch = chance.sample(samples, min(section.batch, len(samples)))
        await trainer.accumulate(batch, Loss(kind="cross_entropy"))
        metrics = await trainer.step(section.learning_rate)
        reporter.warm_start(step, section.steps, metrics["loss"])
    await trainer.publish()


def load_samples(section: WarmStart, renderer: Renderer, heldout: Collection[str] = ()) -> list[Sample]:
    """All that the section names, without what another run wrote on tasks that are held out here."""
    path = section.data / "ledger.sqlite" if section.data.is_dir() else section.data
    if not path.is_file():
        raise ConfigError(f"warm_start.data = {str(section.data)!r}: no such file; give a JSONL file or the folder of a run")
    with path.open("rb") as file:
        is_ledger = file.read(len(SQLITE)) == SQLITE
    samples = list(_from_ledger(path, section.min_reward, heldout) if is_ledger else _from_jsonl(path, renderer))
    if not samples:
        why = f"; no attempt with at least {section.min_reward:g} has sampled tokens (those through a chat server have none)"
        raise ConfigError(f"warm_start.data = {str(section.data)!r} gives no samples{why if is_ledger else ''}")
    return samples


def _from_ledger(path: Path, min_reward: float, heldout: Collection[str]) -> Iterator[Sample]:
    """The tokens as they were sampled, not rendered anew."""
    with Ledger.open(path, read_only=True) as ledger:
        for row in ledger.trajectories(min_reward=min_reward):
            if row.key.task_id in heldout:
                continue
            for segment in filter(lambda s: any(s.mask), row.trajectory.segments):
                yield Sample(segment.tokens, segment.mask, segment.logprobs, segment.versions, 0.0)


def _from_jsonl(path: Path, renderer: Renderer) -> Iterator[Sample]:
    # Not `splitlines`, which also cuts at U+2028 and others that JSON may hold.
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            messages = [from_json(message) for message in row["messages"]]
            tokens, mask = conversation.encode(renderer, messages, row.get("tools") or [])
        except ModelError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}, line {number}: not a JSON object with `messages`: {error!r}") from None
        yield Sample(tokens, mask, [0.0] * len(tokens), [-1] * len(tokens), 0.0)
