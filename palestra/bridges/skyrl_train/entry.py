"""`palestra train` with backend.kind = "skyrl": opens the run, lets SkyRL train, and sums up."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from loguru import logger
from skyrl.train.utils.utils import initialize_ray

from palestra import interrupts, sandboxes
from palestra.backends.torch import model as models
from palestra.bridges.skyrl_train.experiment import CpuExperiment, Experiment, Job
from palestra.bridges.skyrl_train.settings import skyrl_config
from palestra.bridges.skyrl_train.trainers import Stopped
from palestra.config import Config, Skyrl
from palestra.errors import ConfigError, PalestraError
from palestra.ledger import Ledger
from palestra.report import Reporter
from palestra.runs import RunFolder
from palestra.sandbox.opening import make_provider
from palestra.training import task_sets


def train(config: Config, run: RunFolder, reporter: Reporter, stopping: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """Train, or go on training, and return the summary that is also written to the run's folder."""
    assert isinstance(config.backend, Skyrl)
    if config.training is None:
        raise ConfigError("the section [training] is missing; `palestra eval` needs none")
    plan = config.training
    tasks, heldout = task_sets(config, plan)
    model = models.locate(config.backend.model)
    _log_to(run)
    on_cpu = not torch.cuda.is_available()
    cfg = skyrl_config(config, config.backend, plan, run, model=model, tasks=len(tasks), on_cpu=on_cpu)
    if not on_cpu:
        initialize_ray(cfg)
        interrupts.hear_again()  # Ray has a handler of its own
    with Ledger.open(run.ledger) as ledger:
        job = Job(config, config.backend, plan, tasks, heldout, run, reporter, ledger, model)
        return _run((CpuExperiment if on_cpu else Experiment)(cfg, job), stopping)


def _log_to(run: RunFolder) -> None:
    """SkyRL's words go to a file of the run; Palestra reports as it always does."""
    logger.remove()
    logger.add(run.path / "skyrl.log")


def _run(experiment: Experiment, stopping: Callable[[], bool]) -> dict[str, Any]:
    started, job, trainer = time.monotonic(), experiment.job, None
    try:
        trainer = experiment._setup_trainer()
        trainer.stopping = stopping
        _log_to(job.run)  # once more: SkyRL's trainer has sent its words to the terminal again
        interrupts.run(_train(experiment, trainer))
    except Stopped:
        assert trainer is not None
        job.reporter.stopped(job.run.path, trainer.global_step)
        return {"stopped": True, "steps": trainer.global_step}
    except (PalestraError, KeyboardInterrupt):
        raise
    except Exception as error:
        logger.exception("SkyRL's training ended")
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise PalestraError(
            f"SkyRL failed {f'in step {trainer.global_step}' if trainer else 'before it began'}: {reason}; "
            f"{job.run.path / 'skyrl.log'} says more. "
            f"Go on from its last checkpoint with: palestra train --resume {job.run.path}"
        ) from error
    finally:
        experiment.close()
    adapter = job.run.path / "adapter"
    trainer.dispatch.save_hf_model("policy", str(adapter), experiment.tokenizer)
    return _summarise(job, str(adapter), time.monotonic() - started)


async def _train(experiment: Experiment, trainer: Any) -> None:
    sandbox = experiment.job.config.sandbox
    async with sandboxes.provided(lambda: make_provider(sandbox)), experiment.generator.serving():
        await trainer.train()


def _summarise(job: Job, adapter: str, seconds: float) -> dict[str, Any]:
    results: dict[int, dict[str, Mapping[str, Any]]] = {}
    for row in job.run.read_metrics():
        if "evaluation" in row:
            results.setdefault(row["step"], {})[row["evaluation"]] = row
    base, final = results[0], results[job.plan.steps]
    summary = {
        "base": base["sampled"]["pass@1"]["value"],
        "final": final["sampled"]["pass@1"]["value"],
        "steps": job.plan.steps,
        "seconds": round(seconds, 1),
        "adapter": adapter,
        "evaluations": {"base": base, "final": final},
        "trajectories": job.ledger.counts(),
    }
    job.run.write_summary(summary)
    job.reporter.finished(job.run, summary)
    return summary
