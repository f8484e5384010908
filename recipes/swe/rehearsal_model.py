"""Makes the tiny Qwen3 on which `train32b.toml` is rehearsed without a GPU. It knows by heart two ways to deal with the first of
that recipe's tasks: to mend the bug, and to write a note instead. So a step has rewards of 1 and of 0, from hidden tests, and a
gradient. Both ways are played in real sandboxes first, and learned from the tokens that were recorded.

    python recipes/swe/rehearsal_model.py [FOLDER]     by default runs/swe-rehearsal-model
"""

import asyncio
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from palestra import Message, ToolCall, agent, assistant, config, render, sandboxes, taskset
from palestra.backends.opening import Opened
from palestra.backends.scripted import ScriptedSampler
from palestra.backends.torch.opening import open_torch
from palestra.cache import cache_folder
from palestra.collect import prepare
from palestra.ledger import Ledger
from palestra.policy import TokenPolicies
from palestra.rollout import Rollout, run_through
from palestra.runs import RunFolder
from palestra.sandbox.opening import make_provider
from palestra.swe.factory.edit import apply
from palestra.swe.factory.packages import python_files
from palestra.swe.factory.recipe import Recipe
from palestra.swe.factory.task import BugFix
from palestra.tool import Toolbox
from palestra.training import make_collector, sampling_of
from palestra.trajectory import Key, Sample, Trajectory

HERE = Path(__file__).parent
BRIDGES = HERE.parent / "bridges"
TASKS = "tasks.arguments={search = true, lines = 2, first = 2}"
"""Those that it learns; the rehearsal has no others."""
VOCABULARY, POSITIONS = 2048, 40_960
STEPS, LEARNING_RATE = 280, 4e-3


def make(folder: Path) -> None:
    """The model in that folder; from the cache where the very same attempts have been learned by this file before."""
    with tempfile.TemporaryDirectory() as scratch:
        born, samples = asyncio.run(_played(Path(scratch)))
        key = hashlib.sha256(repr([sample.tokens for sample in samples]).encode() + Path(__file__).read_bytes()).hexdigest()[:12]
        cached = cache_folder() / f"swe-rehearsal-model-{key}"
        if not cached.is_dir():
            cached.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cached.parent) as beside:
                os.rename(asyncio.run(_schooled(born, samples, Path(beside) / "schooled")), cached)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(cached, folder)


async def _played(scratch: Path) -> tuple[Path, list[Sample]]:
    """The folder of a random model, and both ways of every task in its tokens."""
    tiny = _module(BRIDGES / "make_model.py")
    recipe = config.load(HERE / "train32b.toml", [TASKS])
    tasks: list[BugFix] = taskset.load(recipe.tasks, "train")
    letters, born = scratch / "letters", scratch / "born"
    tiny.write_tokenizer(letters, [])  # knows letters only, and so can spell what the next one is trained on
    async with sandboxes.provided(lambda: make_provider(recipe.sandbox)):
        texts = [await _prompt(task, letters, scratch) for task in tasks]
        tiny.write_tokenizer(born, texts, VOCABULARY)
        tiny.write_random_model(born, POSITIONS)
        attempts = [await _play(recipe, task, replies, born) for task in tasks for replies in _ways(task.recipe)]
    if [attempt.reward for attempt in attempts] != [1.0, 0.0] * len(tasks):
        raise SystemExit(f"the ways are not worth 1 and 0 in turns: {[(each.reward, each.failure) for each in attempts]}")
    return born, [_sample(attempt) for attempt in attempts]


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def _prompt(task: BugFix, tokenizer: Path, scratch: Path) -> str:
    renderer = render.load(tokenizer, "qwen3")
    await prepare(task, scratch)
    async with AsyncExitStack() as stack:
        env = await task.setup(stack)
        return renderer.decode(renderer.prompt(task.prompt(env), Toolbox(task.tools(env)).schemas()))


def _ways(recipe: Recipe) -> Iterator[list[Message]]:
    look = assistant("", ToolCall("", "search_symbol", {"name": recipe.symbol.rpartition(".")[2]}))
    finish = assistant("", ToolCall("", "finish", {"answer": "done"}))
    yield [look, assistant("", ToolCall("", "edit", _mended(recipe))), finish]
    yield [look, assistant("", ToolCall("", "create", {"path": "notes.txt", "text": "to be mended"})), finish]


def _mended(recipe: Recipe) -> dict[str, str]:
    """The change that takes the bug back, with as many lines before it as make it unique."""
    files, path = python_files(recipe.package), recipe.edit.path
    right, broken = files[path].decode().split("\n"), apply([recipe.edit], files)[path].decode().split("\n")
    first = next(number for number, lines in enumerate(zip(right, broken, strict=False)) if lines[0] != lines[1])
    last = next(number for number, lines in enumerate(zip(right[::-1], broken[::-1], strict=False)) if lines[0] != lines[1])
    while "\n".join(broken).count("\n".join(broken[first : len(broken) - last])) > 1:
        first -= 1
    old, new = ("\n".join(text[first : len(text) - last]) for text in (broken, right))
    return {"path": path, "old": old, "new": new}


async def _play(recipe: config.Config, task: BugFix, replies: Sequence[Message], tokenizer: Path) -> Trajectory:
    """An attempt with these replies, in all else as in training."""
    renderer = render.load(tokenizer)
    left = iter(replies)
    backend = Opened(TokenPolicies(ScriptedSampler(lambda said: next(left), renderer), renderer), renderer, None)
    with tempfile.TemporaryDirectory() as folder, Ledger.open(Path(folder) / "ledger.sqlite") as ledger:
        collector = make_collector(recipe, backend, ledger, RunFolder(Path(folder)))
        key = Key("train", 0, task.id, 0)
        opener, hints = collector.opener(sampling_of(recipe)), collector.hints_for(key)
        rollout = Rollout(task, key, opener, agent.Limits.of(recipe.agent), 0, hints=hints)
        await run_through(rollout)
    return rollout.trajectory


def _sample(trajectory: Trajectory) -> Sample:
    [segment] = trajectory.segments
    return Sample(segment.tokens, segment.mask, segment.logprobs, segment.versions, 0.0)


async def _schooled(born: Path, samples: Sequence[Sample], schooled: Path) -> Path:
    section = config.Torch(model=str(born), dtype="float32", train="full", pack_tokens=65_536)
    run = config.parse({"run": {"folder": "unused"}, "tasks": {"heldout": "unused:unused"}})
    async with open_torch(run, section, training=True) as (_, _, trainer):
        assert trainer is not None
        for step in range(STEPS):
            await trainer.accumulate(samples, config.Loss(kind="cross_entropy"))
            measured = await trainer.step(LEARNING_RATE * min(1.0, (step + 1) / 20, (STEPS - step) / 50))
            if (step + 1) % 20 == 0:
                sys.stderr.write(f"by heart: step {step + 1} of {STEPS}, loss {measured['loss']:.4f}\n")
        await trainer.export(schooled)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(born / name, schooled)
    return schooled


if __name__ == "__main__":
    started = time.monotonic()
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/swe-rehearsal-model")
    make(target)
    sys.stderr.write(f"{target}: made in {time.monotonic() - started:.0f} s\n")
