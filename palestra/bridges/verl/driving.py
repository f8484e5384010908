"""The entry point: starts verl's own trainer with our config, agent loop and tasks, and watches it to its end.

verl keeps the loop, the weights and the checkpoints. Without a GPU, the plugin in `cpu/` stands for what verl has none of there.
"""

import asyncio
import importlib.resources
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import hydra
import ray
import torch
from omegaconf import OmegaConf, open_dict

from palestra import collect, interrupts, sandboxes, taskset
from palestra.backends.torch import model
from palestra.bridges.verl.exporting import export
from palestra.bridges.verl.record import Record
from palestra.bridges.verl.scene import RECORD
from palestra.bridges.verl.settings import settings
from palestra.bridges.verl.watching import Watch
from palestra.config import Config, Training, Verl
from palestra.errors import ConfigError, PalestraError, StorageError, first_line
from palestra.report import Reporter
from palestra.runs import RunFolder, free_name
from palestra.sandbox.opening import make_provider
from palestra.task import AnyTask
from palestra.training import task_sets
from palestra.trajectory import Key, Phase, Trajectory

POLL_SECONDS = 0.5
ERROR = "verl-error.txt"
LATEST = "latest_checkpointed_iteration.txt"
"""Where verl says which of its checkpoints is the newest whole one."""


def train(config: Config, run: RunFolder, reporter: Reporter, stopping: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """Train, or go on from verl's newest checkpoint, and return the summary that is also written to the run's folder."""
    assert isinstance(config.backend, Verl)
    plan = config.training
    if plan is None:
        raise ConfigError("the section [training] is missing; `palestra eval` needs none")
    tasks, heldout = task_sets(config, plan)
    gpu = torch.cuda.is_available()
    folder = model.locate(config.backend.model).resolve()
    keys = settings(config, config.backend, plan, run, folder, gpu)
    name_latest_again(run.checkpoints)
    done = steps_behind(run)
    log = free_name(run.path / "verl-metrics")
    variables = _variables(config.backend, gpu, log)
    os.environ.update(variables)  # before anything imports verl
    # The evaluation after the last step is verl's last act, and may be all that is missing.
    whole = verl_config(keys | {"trainer.val_before_train": done in (0, plan.steps)}, config.backend.overrides)
    interrupts.run(_prepare(config, plan, tasks, heldout, run))
    started = time.monotonic()
    with _cluster(config.backend, gpu, variables) as logs:
        record = ray.remote(Record).options(name=RECORD, num_cpus=0).remote(run.ledger.resolve(), plan)
        ray.get(record.go_on_from.remote(done, f"global_step_{done}"))
        run.keep_metrics(done)
        watch = Watch(config, plan, run, reporter, _Remote(record), log, len(heldout))
        if not _drive(whole, watch, logs, run, stopping):
            reporter.stopped(run.path, steps_behind(run))
            return {"stopped": True, "steps": steps_behind(run)}
        return _summarise(config.backend, plan, run, watch, time.monotonic() - started)


def name_latest_again(checkpoints: Path) -> None:
    """verl writes the name last of all, and empties the file before it does: where a run was killed in between, the newest
    checkpoint is whole."""
    latest = checkpoints / LATEST
    steps = [int(folder.name.removeprefix("global_step_")) for folder in checkpoints.glob("global_step_*")]
    if steps and latest.exists() and not latest.read_text().strip():
        latest.write_text(str(max(steps)))


def steps_behind(run: RunFolder) -> int:
    """How many steps verl's newest checkpoint holds."""
    latest = run.checkpoints / LATEST
    if not latest.exists():
        return 0
    try:
        return int(latest.read_text())
    except ValueError:
        raise StorageError(f"{latest} has no number; write that of a checkpoint beside it, such as 3 for global_step_3") from None


def verl_config(keys: dict[str, Any], overrides: Mapping[str, Any]) -> Any:
    """verl's whole config with these keys set. An override that verl does not know is refused."""
    folder = importlib.resources.files("verl.trainer") / "config"
    with hydra.initialize_config_dir(str(folder), version_base=None):
        whole = hydra.compose("ppo_trainer")
    for key, value in keys.items():
        section, _, name = key.rpartition(".")
        holder = OmegaConf.select(whole, section) if section else whole
        if key in overrides and (holder is None or name not in holder):
            raise ConfigError(f"backend.overrides: verl's config has no key {key!r}")
        with open_dict(holder):
            holder[name] = value
    return whole


async def _prepare(config: Config, plan: Training, tasks: list[AnyTask], heldout: list[AnyTask], run: RunFolder) -> None:
    """All tasks of the run, here and once: its workers are processes that know nothing of each other."""
    steps = (taskset.batch(tasks, step, plan.groups, config.run.seed) for step in range(plan.steps))
    used = {task.id: task for batch in [*steps, heldout] for task in batch}
    async with sandboxes.provided(lambda: make_provider(config.sandbox)), asyncio.TaskGroup() as group:
        for task in used.values():
            group.create_task(collect.prepare(task, run.cache))


def _variables(section: Verl, gpu: bool, log: Path) -> dict[str, str]:
    """What verl's processes read from their environment."""
    variables = {"VERL_FILE_LOGGER_PATH": str(log.resolve()), "TRANSFER_QUEUE_ENABLE": "1", "TOKENIZERS_PARALLELISM": "true"}
    variables["RAY_USAGE_STATS_ENABLED"] = "0"
    if section.threads:
        variables["OMP_NUM_THREADS"] = str(section.threads)
    if not gpu:
        plugins = [os.environ.get("VERL_USE_EXTERNAL_MODULES", ""), "palestra.bridges.verl.cpu"]
        variables |= {
            "VERL_USE_EXTERNAL_MODULES": ",".join(filter(None, plugins)),
            "VERL_ENGINE_DEVICE": "cuda",  # the FSDP engine is registered for that name, and asks the platform for its device
        }
    return variables


@contextmanager
def _cluster(section: Verl, gpu: bool, variables: dict[str, str]) -> Iterator[Path]:
    """Ray; gives the folder of its processes' logs."""
    # Without a GPU: places in Ray's count, not processors. verl asks for one for each of its processes, and for a GPU.
    # Nor does a place need a process before anyone has asked for it.
    places = {"num_cpus": 32, "num_gpus": section.gpus, "_system_config": {"prestart_worker_first_driver": False}}
    here: dict[str, Any] = {} if gpu else {"address": "local", "object_store_memory": 512 << 20, **places}
    ray.init(runtime_env={"env_vars": variables}, include_dashboard=False, log_to_driver=False, logging_level="ERROR", **here)
    interrupts.hear_again()  # Ray has a handler of its own
    try:
        yield Path(ray._private.worker._global_node.get_logs_dir_path())
    finally:
        ray.shutdown()


def _drive(whole: Any, watch: Watch, logs: Path, run: RunFolder, stopping: Callable[[], bool]) -> bool:
    """verl's own task runner, in its actor, until it ends or the user has something to mend; False when asked to stop."""
    from verl.trainer.main_ppo import TaskRunnerV1
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    with redirect_stdout(sys.stderr):  # it prints that all is well
        validate_config(config=whole, use_reference_policy=need_reference_policy(whole), use_critic=need_critic(whole))
    ending = TaskRunnerV1.remote().run.remote(whole)
    ended: list[Any] = []
    while not ended:
        ended, _ = ray.wait([ending], timeout=POLL_SECONDS)
        if refusal := watch.poll():
            raise refusal
        if stopping():  # verl cannot be asked: what it did since its last checkpoint is done again
            return False
    try:
        ray.get(ending)
    except ray.exceptions.RayError as error:
        raise _explained(error, logs, run) from None
    watch.poll()
    return True


def _explained(error: ray.exceptions.RayError, logs: Path, run: RunFolder) -> PalestraError:
    """One line, and the whole story in a file."""
    (run.path / ERROR).write_text(f"{error}\n\nThe logs of verl's processes: {logs}\n", encoding="utf-8")
    cause = getattr(error, "cause", None) or error
    first = first_line(cause)
    said = first if isinstance(cause, PalestraError) else f"verl's trainer ended: {type(cause).__name__}: {first}"
    return PalestraError(
        f"{said} ({run.path / ERROR} has the whole of it). verl's checkpoints hold {steps_behind(run)} steps; "
        f"go on with `palestra train --resume {run.path}`"
    )


class _Remote:
    """The record, seen from outside its process."""

    def __init__(self, record: Any) -> None:
        self._record = record

    def news(self) -> tuple[list[tuple[Key, Trajectory]], PalestraError | None]:
        return ray.get(self._record.news.remote())  # type: ignore[no-any-return]

    def evaluation(self, phase: Phase, step: int) -> list[Trajectory]:
        return ray.get(self._record.evaluation.remote(phase, step))  # type: ignore[no-any-return]


def _summarise(section: Verl, plan: Training, run: RunFolder, watch: Watch, seconds: float) -> dict[str, Any]:
    base = watch.results.get(0) or watch.evaluate(0)
    final = watch.results.get(plan.steps) or watch.evaluate(plan.steps)
    adapter = run.path / "adapter"
    export(run.checkpoints / f"global_step_{plan.steps}" / "actor", adapter, section)
    summary = {
        "base": base["sampled"].success.value,
        "final": final["sampled"].success.value,
        "steps": plan.steps,
        "seconds": round(seconds, 1),
        "adapter": str(adapter),
        "evaluations": {
            when: {name: result.to_json() for name, result in results.items()}
            for when, results in (("base", base), ("final", final))
        },
    }
    run.write_summary(summary)
    return summary
