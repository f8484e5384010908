"""The trajectories that every backend is given, and what it must make of them: recorded.json, which record.py makes.

Six groups of four attempts: over several turns, of several segments, failed, masked by how they stopped, a group without
spread. `now` are the logprobs of a policy that is one step on, so ratios are not 1.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from palestra import loss as losses
from palestra.advantage import credit
from palestra.config import Loss
from palestra.trajectory import Failure, Group, Sample, Segment, Trajectory

FILE = Path(__file__).with_name("recorded.json")
MASKED = frozenset({"turns"})
LOSSES = [
    Loss.model_validate({"kind": kind, "reduction": reduction, "clip_low": 0.1, "clip_high": 0.15, "constant": 50.0})
    for kind in ("importance_sampling", "ppo", "gspo", "cispo")
    for reduction in ("token_mean", "sequence_mean", "constant")
]


def name_of(loss: Loss) -> str:
    return f"{loss.kind}, {loss.reduction}"


@dataclass(frozen=True)
class Recorded:
    groups: list[Group]
    samples: list[Sample]
    """With the advantages that are in the file."""
    now: list[list[float]]
    """For each sample, those of its sampled tokens."""
    losses: dict[str, tuple[float, float]]
    """By `name_of`: the loss, and the length of its gradient with respect to `now`."""


@cache
def recorded() -> Recorded:
    read = json.loads(FILE.read_text(encoding="utf-8"))
    groups = [Group(group[0]["task"], tuple(map(_trajectory, group))) for group in read["groups"]]
    counted = [t for group in groups if _spread(group) for t in group.trajectories if _counts(t)]
    trained = [(t.task_id, segment) for t in counted for segment in t.segments if any(segment.mask)]
    samples = [_sample(s, advantage, task) for (task, s), advantage in zip(trained, read["advantages"], strict=True)]
    return Recorded(groups, samples, read["now"], {name: (v["loss"], v["gradient"]) for name, v in read["losses"].items()})


def _spread(group: Group) -> bool:
    return len({trajectory.reward for trajectory in group.trajectories if trajectory.failure is None}) > 1


def _counts(trajectory: Trajectory) -> bool:
    return trajectory.failure is None and trajectory.stop not in MASKED


def _trajectory(value: dict[str, Any]) -> Trajectory:
    failure = Failure("init", "infrastructure", "no register today") if value["reward"] is None else None
    segments = [_segment(**segment) for segment in value["segments"]]
    return Trajectory(
        value["task"], value["index"], segments=segments, stop=value["stop"], reward=value["reward"], failure=failure
    )


def _segment(tokens: list[int], logprobs: list[float | None]) -> Segment:
    mask = [value is not None for value in logprobs]
    return Segment(tokens, mask, [value or 0.0 for value in logprobs], [0 if sampled else -1 for sampled in mask])


def _sample(segment: Segment, advantage: float, task: str) -> Sample:
    end = len(segment) - segment.mask[::-1].index(True)
    return Sample(segment.tokens[:end], segment.mask[:end], segment.logprobs[:end], segment.versions[:end], advantage, 1.0, task)


def credited(groups: list[Group]) -> list[Sample]:
    """The embedded backend's samples."""
    return [sample for group in groups for sample in credit(group, "grpo", masked_stops=MASKED).samples]


def embedded_loss(samples: list[Sample], now: list[list[float]], loss: Loss) -> tuple[float, float]:
    """The embedded backend's loss where these are the policy's logprobs, and the length of its gradient."""
    logprobs = torch.tensor([value for values in now for value in values], requires_grad=True)
    lengths = torch.tensor([sum(sample.mask) for sample in samples])
    sequence = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    tokens = losses.Tokens(
        old_logprobs=torch.tensor([x for s in samples for x, sampled in zip(s.logprobs, s.mask, strict=True) if sampled]),
        advantages=torch.tensor([sample.advantage for sample in samples])[sequence],
        weights=torch.ones(len(logprobs)),
        sequence=sequence,
        lengths=lengths,
    )
    summed, _ = losses.policy_loss(logprobs, tokens, loss)
    value = summed / losses.normaliser(loss, float(lengths.sum()), float(len(samples)))
    [gradient] = torch.autograd.grad(value, logprobs)
    return value.item(), gradient.norm().item()
