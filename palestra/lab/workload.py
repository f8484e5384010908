"""A workload: everything about a job that a schedule cannot change, as one TOML file. Each training step's trajectories are
drawn from it before they are played, so that every schedule meets the same ones.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pydantic
from numpy.typing import NDArray
from pydantic import Field

from palestra.config.section import Section, read_toml, validated
from palestra.errors import ConfigError, nearest

FOLDER = Path(__file__).parent / "workloads"

MOST_TURNS = 10_000_000
"""Of one step: they are drawn all at once."""


# What is far beyond these cannot be told from a mistake, and the clock would take too long to get there.
Count = Annotated[int, Field(gt=0, le=10**9)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]
SecondsOrNone = Annotated[float, Field(ge=0, le=1e6)]
Rate = Annotated[float, Field(ge=0.01, le=1e9)]
Median = Annotated[float, Field(gt=0, le=1e9)]
Sigma = Annotated[float, Field(ge=0, le=10)]


class Quantities(Section):
    """Numbers that are finite."""

    model_config = pydantic.ConfigDict(allow_inf_nan=False)


class Batch(Quantities):
    """What one training step consumes."""

    tasks: Count
    samples: Count
    steps: Count


class Turns(Quantities):
    """Turns of a trajectory, were its context endless: a lognormal over tasks times one over samples."""

    median: Median
    task_sigma: Sigma
    sample_sigma: Sigma
    least: Count
    most: Count


class Tokens(Quantities):
    """Tokens a turn: a lognormal, clipped."""

    median: Median
    sigma: Sigma
    least: Count
    most: Count


class Context(Quantities):
    start: Count
    """Tokens of the first prompt."""
    end: Count
    """Tokens at which a trajectory ends."""


class Tools(Quantities):
    """Seconds a tool takes: one of two lognormals, clipped."""

    median: Seconds
    sigma: Sigma
    slow_share: Annotated[float, Field(ge=0, le=1)]
    slow_median: Seconds
    slow_sigma: Sigma
    most: Seconds


class Init(Quantities):
    """Seconds of work to open a runtime (lognormal), and how many such works run at full speed at once."""

    mean: Seconds
    sigma: Sigma
    capacity: Rate


class Reward(Quantities):
    """Seconds of work to judge a result: a lognormal over tasks times one over samples, and how many run at full speed."""

    mean: Seconds
    task_sigma: Sigma
    sample_sigma: Sigma
    capacity: Rate


class Engine(Quantities):
    """Units that generate in step with each other, with the sequences spread evenly over them."""

    units: Count
    step_seconds: Seconds
    """What a step takes before any sequence is in it."""
    decode_seconds: SecondsOrNone
    """What each decoding sequence on a unit adds."""
    prefill_rate: Rate
    """Tokens a unit prefills in a second."""
    prefill_chunk: Count
    """Tokens that a prefilling sequence advances in a step."""
    whole_chunks: bool = False
    """Whether the last tokens of a prefill take a whole step, however few they are, and not their share of one."""
    kv_tokens: Count
    """Tokens whose keys and values one unit holds."""
    switch_keeps_kv: bool
    """Whether a unit that trains for a while keeps its keys and values; then the others read them meanwhile."""
    shares_prompts: bool = False
    """Whether attempts at one task prefill the prompt that they all begin with once, and hold its keys and values once, as long
    as one of them is resident."""

    def step(self, units: int, decoding: int, prefilling: int = 0) -> float:
        """Seconds of one step."""
        prefill = prefilling * self.prefill_chunk / self.prefill_rate
        return self.step_seconds + (decoding * self.decode_seconds + prefill) / units

    def prefill_steps(self, tokens: float) -> float:
        """How many steps of a sequence so many tokens take."""
        steps = tokens / self.prefill_chunk
        return math.ceil(steps) if self.whole_chunks else steps


class Training(Quantities):
    seconds: Seconds
    """The gradients of one batch, with all units at work."""
    publish_seconds: SecondsOrNone


@dataclass(frozen=True, slots=True)
class Turn:
    new_tokens: int
    """What the context gained since the last reply: the prompt at first, then what the last tool returned."""
    output_tokens: int
    tool_seconds: float


@dataclass(frozen=True, slots=True)
class Job:
    """One trajectory: the work it will ask for, whatever the schedule."""

    init_seconds: float
    turns: tuple[Turn, ...]
    reward_seconds: float


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds below which no on-policy schedule can bring one step's jobs, each by one resource alone."""

    gpu: float
    init: float
    reward: float
    critical_path: float
    """The slowest trajectory, were it alone."""
    step: float
    """Generation at full KV, training and publishing: what the units have to do, one after the other."""


class Workload(Quantities):
    batch: Batch
    turns: Turns
    output: Tokens
    observation: Tokens
    context: Context
    tools: Tools
    init: Init
    reward: Reward
    engine: Engine
    training: Training

    @pydantic.model_validator(mode="after")
    def _can_be_played(self) -> "Workload":
        if self.context.end <= self.context.start:
            raise ValueError(f"context.end = {self.context.end} leaves no room after context.start = {self.context.start}")
        for name in ("turns", "output", "observation"):
            section: Turns | Tokens = getattr(self, name)
            if section.least > section.most:
                raise ValueError(f"{name}.least = {section.least} is more than {name}.most = {section.most}")
        turns = self.batch.tasks * self.batch.samples * self.turns.most
        if turns > MOST_TURNS:
            raise ValueError(
                f"batch.tasks · batch.samples · turns.most = {turns} turns a step; the lab plays at most {MOST_TURNS} of them"
            )
        if self.context.end > self.engine.kv_tokens:
            raise ValueError(f"engine.kv_tokens = {self.engine.kv_tokens} does not hold one context of {self.context.end}")
        return self

    def draw(self, seed: int, step: int) -> list[list[Job]]:
        """The jobs of one training step, by task and sample.

        The draws are whole arrays in this order, so that a job does not depend on how long the others are: turns over tasks,
        turns over samples, output tokens, observation tokens, which tools are slow, tool times, init, reward over tasks,
        reward over samples.
        """
        draws = np.random.default_rng([seed, step])
        tasks, samples = self.batch.tasks, self.batch.samples
        jobs, each = (tasks, samples), (tasks, samples, self.turns.most)
        over_tasks, over_samples = draws.standard_normal((tasks, 1)), draws.standard_normal(jobs)
        lengths = self.turns.median * np.exp(self.turns.task_sigma * over_tasks + self.turns.sample_sigma * over_samples)
        turns = np.clip(np.rint(lengths), self.turns.least, self.turns.most).astype(int)
        outputs = _tokens(self.output, draws.standard_normal(each))
        observations = _tokens(self.observation, draws.standard_normal(each))
        slow, normal = draws.random(each) < self.tools.slow_share, draws.standard_normal(each)
        slow_seconds = self.tools.slow_median * np.exp(self.tools.slow_sigma * normal)
        seconds = np.where(slow, slow_seconds, self.tools.median * np.exp(self.tools.sigma * normal))
        seconds = np.minimum(seconds, self.tools.most)
        inits = _with_mean(self.init.mean, self.init.sigma * draws.standard_normal(jobs), self.init.sigma**2)
        over_tasks, over_samples = draws.standard_normal((tasks, 1)), draws.standard_normal(jobs)
        exponents = self.reward.task_sigma * over_tasks + self.reward.sample_sigma * over_samples
        rewards = _with_mean(self.reward.mean, exponents, self.reward.task_sigma**2 + self.reward.sample_sigma**2)
        return [
            [
                Job(
                    float(inits[at]),
                    self._turns(*(array[at][: turns[at]].tolist() for array in (outputs, observations, seconds))),
                    float(rewards[at]),
                )
                for at in ((task, sample) for sample in range(samples))
            ]
            for task in range(tasks)
        ]

    def _turns(self, outputs: list[int], observations: list[int], seconds: list[float]) -> tuple[Turn, ...]:
        """The turns that fit into the context; the last reply is cut where the context ends."""
        turns: list[Turn] = []
        length, new = 0, self.context.start
        for output, observation, tool in zip(outputs, observations, seconds, strict=True):
            room = self.context.end - length - new
            if room <= 0:
                break
            if output >= room:
                turns.append(Turn(new, room, 0.0))
                break
            turns.append(Turn(new, output, tool))
            length += new + output
            new = observation
        return tuple(turns)

    def limits(self, jobs: Sequence[Sequence[Job]]) -> Limits:
        engine = self.engine
        every = [job for group in jobs for job in group]
        spared = self.spared_tokens
        attended = decoded = prefilled = 0.0
        for job in every:
            length = -spared
            prefilled -= spared
            for turn in job.turns:
                length += turn.new_tokens
                attended += turn.output_tokens * (length + turn.output_tokens / 2)
                length += turn.output_tokens
                decoded += turn.output_tokens
                prefilled += turn.new_tokens
        # With KV full of decoding sequences, a step's fixed cost is shared by kv_tokens / context of them.
        fixed = engine.step_seconds * attended / engine.kv_tokens
        gpu = (fixed + engine.decode_seconds * decoded + prefilled / engine.prefill_rate) / engine.units
        return Limits(
            gpu=gpu,
            init=sum(job.init_seconds for job in every) / self.init.capacity,
            reward=sum(job.reward_seconds for job in every) / self.reward.capacity,
            critical_path=max(self._alone(job, self._new(job)) for job in every),
            step=gpu + self.training.seconds + self.training.publish_seconds,
        )

    def one_by_one(self, jobs: Sequence[Sequence[Job]]) -> float:
        """Seconds that they take one after the other, were the whole context prefilled again at every turn."""
        return sum(self._alone(job, _whole_contexts(job)) for group in jobs for job in group)

    @property
    def spared_tokens(self) -> float:
        """What each attempt need not prefill or hold, where attempts at one task share their prompt and are all resident."""
        return self.shared_tokens * (1 - 1 / self.batch.samples)

    @property
    def shared_tokens(self) -> int:
        """Of a prompt; its last one is computed by every attempt, to write the first of its reply."""
        return self.context.start - 1 if self.engine.shares_prompts else 0

    def _new(self, job: Job) -> Iterator[int]:
        """What each turn prefills where no KV is lost, and others may have prefilled the prompt that they share."""
        return (turn.new_tokens - spared for turn, spared in zip(job.turns, chain([self.shared_tokens], repeat(0)), strict=False))

    def _alone(self, job: Job, prefilled: Iterable[int]) -> float:
        """Seconds that a job takes with nobody else there, were so many tokens prefilled in each turn."""
        engine = self.engine
        prefill, decode = engine.step(engine.units, 0, 1), engine.step(engine.units, 1)
        run = 0.0
        for turn, tokens in zip(job.turns, prefilled, strict=True):
            run += engine.prefill_steps(tokens) * prefill + turn.output_tokens * decode + turn.tool_seconds
        init, reward = (min(1.0, stage.capacity) for stage in (self.init, self.reward))
        return job.init_seconds / init + run + job.reward_seconds / reward


def _whole_contexts(job: Job) -> Iterator[int]:
    """What each turn prefills where all KV was lost before it."""
    length = 0
    for turn in job.turns:
        length += turn.new_tokens
        yield length
        length += turn.output_tokens


def _tokens(tokens: Tokens, normal: NDArray[np.float64]) -> NDArray[np.int_]:
    drawn = np.rint(tokens.median * np.exp(tokens.sigma * normal))
    return np.clip(drawn, tokens.least, tokens.most).astype(int)


def _with_mean(mean: float, exponents: NDArray[np.float64], variance: float) -> NDArray[np.float64]:
    """A lognormal with this mean, where the median would be the natural parameter."""
    return mean * np.exp(exponents - variance / 2)


def load(name: str) -> Workload:
    """A workload that ships with the lab by its name, such as `w1`, or any by the path of its .toml file."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    return parse(_read(path), str(path))


def parse(values: dict[str, Any], source: str = "workload") -> Workload:
    """A workload's sections. With a `base`, the name of one that ships, only what differs from it."""
    base = values.get("base")
    if base is None:
        return validated(Workload, values, source)
    if not isinstance(base, str):
        raise ConfigError(f'{source}: base = {base!r}: give the name of a workload that ships, such as "w1"')
    whole = _read(FOLDER / f"{base}.toml")
    for name, section in values.items():
        if name != "base":
            whole[name] = whole.get(name, {}) | section if isinstance(section, dict) else section
    return parse(whole, source)


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_toml(path)
    except FileNotFoundError:
        if path.parent != FOLDER:
            raise ConfigError(f"no workload file {path}") from None
        names = [file.stem for file in FOLDER.glob("*.toml")]
        raise ConfigError(f"no workload {path.stem!r}{nearest(path.stem, names)}") from None
