"""What every process of a verl run knows of our side: the config, its tasks and the renderer, read once from the run's folder."""

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from palestra import agent, config, render, taskset
from palestra.config import Config, Verl
from palestra.protocols import Renderer, Sampling
from palestra.rollout import Patience
from palestra.task import AnyTask

CONFIG = "palestra_config"
"""The key of ours in verl's `data` section: the path of the run's config."""

RECORD = "palestra-record"
"""The name of the actor that keeps the run's ledger."""


@dataclass(eq=False)
class Scene:
    config: Config
    model: Path

    @property
    def limits(self) -> agent.Limits:
        return agent.Limits.of(self.config.agent)

    @property
    def patience(self) -> Patience:
        dispatch = self.config.dispatch
        return Patience(dispatch.init_seconds, dispatch.reward_seconds, dispatch.retries, dispatch.backoff)

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.config.sampling.temperature, self.config.sampling.max_tokens)

    @cached_property
    def tasks(self) -> dict[str, AnyTask]:
        return {task.id: task for key in ("train", "heldout") for task in taskset.load(self.config.tasks, key)}

    @cached_property
    def renderer(self) -> Renderer:
        section = self.config.backend
        assert isinstance(section, Verl)
        return render.load(self.model, section.renderer, section.thinking)


@cache
def open_scene(path: str, model: str) -> Scene:
    return Scene(config.load(Path(path)), Path(model))
