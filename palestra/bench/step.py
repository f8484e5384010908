"""One whole GRPO step of the quickstart recipe, measured: rollouts, gradients, update, new weights for the sampler."""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from palestra import interrupts, render, taskset
from palestra.advantage import credit
from palestra.backends.opening import open_backend
from palestra.backends.torch import model as models
from palestra.collect import group_of
from palestra.config import Config, Training, load
from palestra.errors import UsageError
from palestra.ledger import Ledger
from palestra.pace import Pace
from palestra.runs import RunFolder
from palestra.task import AnyTask
from palestra.tool import Toolbox
from palestra.training import make_collector, sampling_of


def measure_own_step() -> dict[str, Any]:
    return interrupts.run(_measure(quickstart()))


def quickstart() -> Config:
    path = Path(__file__).parents[2] / "recipes" / "quickstart" / "train.toml"
    if not path.is_file():
        raise UsageError(f"the bench measures the recipe {path}, which is not there; run it from a checkout")
    return load(path, ["training.groups=6"])


def bench_tasks(config: Config, plan: Training) -> list[AnyTask]:
    return taskset.batch(taskset.load(config.tasks, "train"), 0, plan.groups, config.run.seed)


async def _measure(config: Config) -> dict[str, Any]:
    plan = config.training
    assert plan is not None
    tasks = bench_tasks(config, plan)
    with tempfile.TemporaryDirectory() as folder, Ledger.open(Path(folder) / "ledger.sqlite") as ledger:
        async with open_backend(config, training=True) as backend:
            assert backend.trainer is not None
            collector = make_collector(config, backend, ledger, RunFolder(Path(folder)))
            started, sampled = time.process_time(), 0.0
            pace = Pace(plan.groups, 1)
            async with collector.groups(iter([(0, tasks)]), plan.samples, pace, sampling_of(config)) as stream:
                groups = [group_of(await anext(stream)) for _ in tasks]
            collected = time.process_time()
            for group in groups:
                # Groups without spread are trained too, on advantages of zero: the peer does not leave them out.
                samples = credit(group, plan.estimator, keep_flat=True).samples
                sampled += sum(sum(sample.mask) for sample in samples)
                await backend.trainer.accumulate(samples, config.loss)
            metrics = await backend.trainer.step(plan.learning_rate)
            await backend.trainer.publish()
            ended = time.process_time()
    return {
        "cpu_seconds": ended - started,
        "generation_cpu_seconds": collected - started,
        "training_cpu_seconds": ended - collected,
        "sampled_tokens": int(sampled),
        "computed_tokens": int(metrics["computed_tokens"]),
        "turns": sum(len(t.turns) for g in groups for t in g.trajectories) / (plan.groups * plan.samples),
    }


def write_trl_tasks(path: Path) -> None:
    """The same tasks for the peer. Its template has one system text and one question, so everything that our prompt says
    before the question, markers included, becomes that system text: the tokens are the same."""
    config = quickstart()
    plan, lora = config.training, getattr(config.backend, "lora", None)
    assert plan is not None
    assert lora is not None
    renderer = render.load(models.locate(models.DEFAULT))
    questions, system = [], ""
    for task in bench_tasks(config, plan):
        messages = list(task.prompt(None))
        question = messages[-1].text
        text = renderer.decode(renderer.prompt(messages, Toolbox(task.tools(None)).schemas()))
        system = text.removeprefix("<|im_start|>system\n").rpartition(f"<|im_end|>\n<|im_start|>user\n{question}")[0]
        questions.append({"question": question, "answer": str(getattr(task, "answer", ""))})
    tasks = {
        "system": system,
        "questions": questions,
        "samples": plan.samples,
        "temperature": config.sampling.temperature,
        "lora_rank": lora.rank,
        "lora_alpha": lora.alpha,
        "learning_rate": plan.learning_rate,
        "turns": config.agent.turns,
    }
    path.write_text(json.dumps(tasks), encoding="utf-8")
