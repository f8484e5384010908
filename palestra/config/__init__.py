"""The one TOML file of a run, as frozen models. Every key is known and none is ignored: a wrong one is named, with the
nearest right one, before anything starts.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import tomli_w
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from palestra.advantage import Estimator, SegmentWeight
from palestra.config.backend import (
    Backend,
    Scripted,
    Skyrl,
    Tinker,
    Torch,
    Verl,
    refuse_what_cannot_be_honoured,
)
from palestra.config.dispatch import (
    AnyDispatch,
    BatchDispatch,
    BoundedDispatch,
    Dispatch,
    PipelineDispatch,
    StreamDispatch,
)
from palestra.config.hints import Hints
from palestra.config.openai import OpenAI, Prices
from palestra.config.sandbox import AnySandbox, BubblewrapSandbox, ContainerSandbox, LocalSandbox, Sandbox
from palestra.config.section import Located, Section, read_toml, validated
from palestra.config.tools import Tools
from palestra.errors import ConfigError
from palestra.trajectory import Stop

__all__ = [
    "Agent",
    "AnyDispatch",
    "AnySandbox",
    "BatchDispatch",
    "BoundedDispatch",
    "BubblewrapSandbox",
    "Config",
    "ContainerSandbox",
    "Evaluation",
    "Hints",
    "LocalSandbox",
    "Loss",
    "OpenAI",
    "PipelineDispatch",
    "Prices",
    "Report",
    "Run",
    "Sampling",
    "Scripted",
    "Skyrl",
    "StreamDispatch",
    "Tasks",
    "Tinker",
    "Tools",
    "Torch",
    "Training",
    "Verl",
    "WarmStart",
    "dump",
    "load",
    "parse",
]


class Run(Section):
    folder: Path
    """Where the run's ledger, checkpoints, metrics and pictures go; relative to where the command is called."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0


class Tasks(Section):
    """Task sets as `module:object`; the object is a sequence of tasks or a function that returns one."""

    train: str | None = None
    heldout: str
    folder: Path = Path()
    """Where modules are looked for first; relative to the config file."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for a function that makes tasks."""


class Agent(Section):
    turns: PositiveInt = 16
    context: PositiveInt = 4096
    """Tokens of one segment, prompt included."""
    seconds: PositiveFloat = 600.0
    """Time for one run, tools included."""
    remind: NonNegativeInt = 0
    """Every so many turns the agent is told how many turns and tokens are left; 0: never."""


class Sampling(Section):
    temperature: NonNegativeFloat = 1.0
    max_tokens: PositiveInt = 512
    """Tokens of one reply."""


class Loss(Section):
    """Which loss, and its constants."""

    kind: Literal["importance_sampling", "ppo", "gspo", "cispo", "cross_entropy"] = "ppo"
    clip_low: NonNegativeFloat = 0.2
    clip_high: NonNegativeFloat = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """For negative advantages: the ratio beyond which a token no longer pushes (Ye et al., 2019). Needs ppo or gspo."""
    reduction: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    constant: PositiveFloat = 1024.0
    """With the constant reduction (Dr. GRPO): what each sequence's sum is divided by, whatever its length."""
    kl: NonNegativeFloat = 0.0
    """The coefficient of the KL to the reference: the base under the adapter or, with all weights, the model at the start."""
    truncate: PositiveFloat | None = None
    """The cap on importance weights between sampler and trainer; see `loss.policy_loss`."""

    @pydantic.model_validator(mode="after")
    def _goes_together(self) -> "Loss":
        if self.dual_clip is not None and self.kind not in ("ppo", "gspo"):
            raise ValueError("dual_clip goes with the kinds 'ppo' and 'gspo' only")
        if self.truncate is not None and self.kind == "cross_entropy":
            raise ValueError("truncate does not go with the kind 'cross_entropy'")
        return self


class WarmStart(Section):
    """Supervised steps before RL."""

    data: Located
    """A JSONL file with `messages` (and `tools`) on each line, or the ledger of another run."""
    min_reward: float = 1.0
    """From a ledger: only trajectories with at least this reward."""
    steps: PositiveInt
    batch: PositiveInt = 16
    learning_rate: PositiveFloat = 2e-4


class Training(Section):
    steps: PositiveInt
    groups: PositiveInt
    """Tasks of one step."""
    samples: int = Field(ge=2)
    """Attempts at each task of a step."""
    learning_rate: PositiveFloat
    warmup_steps: NonNegativeInt = 0
    max_grad_norm: PositiveFloat = 1.0
    estimator: Estimator = "grpo"
    min_group: Annotated[int, Field(ge=2)] = 2
    """A group with fewer attempts that did not fail is dropped, and counted."""
    masked_stops: Annotated[frozenset[Stop], pydantic.PlainSerializer(sorted)] = frozenset()
    """Runs that stopped so count in the baseline but are not trained on."""
    segment_weight: SegmentWeight = "segment"
    staleness: NonNegativeInt = 0
    """How many updates may lie between a group's first token and its training; 0 is strictly on-policy."""
    refill: bool = False
    """Dynamic sampling: a group without a gradient is replaced by another one of the same step."""
    oversample: Annotated[float, Field(ge=1, le=4)] = 1.0
    """Begin so many times the groups of a step, and abandon those that are not complete when it is full."""
    shuffle_rewards: bool = False
    """A control: each group's rewards are dealt out at random among its attempts. Nothing should be learned."""
    save_every: PositiveInt = 1
    keep_checkpoints: PositiveInt = 2

    @pydantic.model_validator(mode="after")
    def _can_learn(self) -> "Training":
        if self.min_group > self.samples:
            raise ValueError(f"min_group = {self.min_group} is more than samples = {self.samples}: every group would be dropped")
        if self.oversample > 1 and self.staleness:
            raise ValueError("oversample goes with staleness = 0 only: a later step takes what an earlier one did not wait for")
        return self


class Evaluation(Section):
    every: NonNegativeInt = 0
    """Evaluate on held-out tasks every so many steps; 0: only before and after."""
    tasks: PositiveInt | None = None
    """The first so many held-out tasks; all when not given."""
    samples: PositiveInt = 1
    greedy: bool = True
    """Before and after, also evaluate at temperature 0."""


class Report(Section):
    tensorboard: bool = False
    wandb: str | None = None
    """A Weights & Biases project."""


class Config(Section):
    run: Run
    tasks: Tasks
    agent: Agent = Agent()
    sampling: Sampling = Sampling()
    tools: Tools = Tools()
    hints: Hints = Hints()
    backend: Backend = Torch()
    loss: Loss = Loss()
    training: Training | None = None
    warm_start: WarmStart | None = None
    evaluation: Evaluation = Evaluation()
    dispatch: Dispatch = StreamDispatch(kind="stream")
    sandbox: Sandbox = BubblewrapSandbox(kind="bubblewrap")
    report: Report = Report()

    @pydantic.model_validator(mode="after")
    def _can_be_honoured(self) -> "Config":
        refuse_what_cannot_be_honoured(self.backend, self._value_of)
        if isinstance(self.backend, Torch) and self.backend.kv_tokens < self.agent.context:
            kv_tokens, context = self.backend.kv_tokens, self.agent.context
            raise ValueError(f"backend.kv_tokens = {kv_tokens} does not hold one context of agent.context = {context} tokens")
        return self

    def _value_of(self, key: str) -> Any:
        value: Any = self
        for step in key.split("."):
            value = getattr(value, step, None)
        return value


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config file; each override is `section.key=value`, with the value as TOML would write it (or a bare word)."""
    try:
        values = read_toml(path)
    except FileNotFoundError:
        raise ConfigError(f"no config file {path}; give the path of a .toml file") from None
    for override in overrides:
        _set(values, override)
    tasks = values.get("tasks")
    if isinstance(tasks, dict):
        folder = tasks.get("folder", "")
        if isinstance(folder, str):  # anything else is refused below
            tasks["folder"] = str((path.parent / folder).resolve())
    return parse(values, str(path))


def parse(values: Mapping[str, Any], source: str = "config") -> Config:
    return validated(Config, values, source)


def dump(config: Config) -> str:
    """The resolved config as TOML, which `load` reads back."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _set(values: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    *sections, key = path.strip().split(".")
    if not equals or not sections or not key:
        raise ConfigError(f"override {override!r}: write section.key=value, such as training.steps=8")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"override {override!r}: {section!r} is a value, not a section")
    values[key] = value
