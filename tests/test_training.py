"""Whole runs on a tiny model: what is recorded, what survives kill -9 and Ctrl-C, and what bad input says."""

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from palestra.ledger import Ledger

pytest.importorskip("torch")
STEPS, GROUPS, SAMPLES = 4, 2, 3

TASK = '''
import asyncio
from dataclasses import dataclass
from pathlib import Path
from palestra import Finish, Task, user

def finish(answer: str) -> Finish:
    """Hand in the answer."""
    return Finish(answer)

@dataclass(frozen=True)
class Luck(Task):
    """A random model's luck: whether its reply has an even number of letters."""

    def prompt(self, env):
        return [user(f"task {self.id}: say something")]

    def tools(self, env):
        return [finish]

    async def score(self, artifact, trajectory, stack):
        return float(len(str(artifact)) % 2 == 0) if trajectory.turns else 0.0

    async def solve(self, env):
        return "ok"

@dataclass(frozen=True)
class Guarded(Luck):
    """It says when its runtime opens and closes, and takes a while for it; its reward takes for ever."""

    async def setup(self, stack):
        say("open")
        stack.push_async_callback(self.close)

    async def close(self):
        await asyncio.sleep(0.5)
        say("close")

    async def score(self, artifact, trajectory, stack):
        await self.setup(stack)
        await asyncio.sleep(1e6)

def say(what):
    with open(Path(__file__).with_name("said"), "a") as file:
        file.write(what + "\\n")

train = [Luck(f"train-{i}") for i in range(5)]
guarded = [Guarded(f"guarded-{i}") for i in range(5)]
heldout = [Luck(f"heldout-{i}") for i in range(3)]
'''

CONFIG = f"""
[run]
folder = "FOLDER/run"
[tasks]
train = "task:train"
heldout = "task:heldout"
[agent]
turns = 2
context = 1500
[sampling]
max_tokens = 12
[backend]
kind = "torch"
model = "MODEL"
dtype = "float32"
lora = {{ rank = 2, alpha = 4 }}
[training]
steps = {STEPS}
groups = {GROUPS}
samples = {SAMPLES}
learning_rate = 1e-2
[evaluation]
every = 2
greedy = false
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a ChatML tokenizer, as a folder."""
    import tokenizers
    import torch
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(["say something"], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=2048, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def config(tmp_path: Path, model: Path) -> Path:
    (tmp_path / "task.py").write_text(TASK)
    path = tmp_path / "train.toml"
    path.write_text(CONFIG.replace("FOLDER", str(tmp_path)).replace("MODEL", str(model)))
    return path


def palestra(*arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "palestra", *map(str, arguments)]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def read(run: Path) -> dict[Any, tuple[str, Any]]:
    with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify() == []
        return {row.key: (row.state, row.trajectory) for row in ledger.trajectories()}


def assert_complete(run: Path) -> None:
    rows = read(run)
    trained = [key for key, (state, _) in rows.items() if key.phase == "train" and state in ("consumed", "filtered")]
    assert len(trained) == len(set(trained)) == STEPS * GROUPS * SAMPLES
    assert {state for state, _ in rows.values()} <= {"consumed", "filtered", "evaluated"}
    with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
        assert list(ledger.steps()) == list(range(STEPS))
    summary = json.loads((run / "summary.json").read_text())
    assert {"base", "final", "steps", "seconds", "adapter"} <= summary.keys()
    assert (Path(summary["adapter"]) / "adapter_model.safetensors").is_file()
    assert (run / "curve.png").stat().st_size > 1000


def test_a_run_records_everything_and_ends_with_its_summary(config: Path) -> None:
    code, out, err = finish(palestra("train", config))
    assert code == 0, err
    run = config.parent / "run"
    assert_complete(run)
    assert json.loads(out.strip().splitlines()[-1]).keys() == {"base", "final", "steps", "seconds", "adapter"}
    trajectory = next(t for key, (_, t) in read(run).items() if key.phase == "train")
    assert trajectory.messages[0].text.startswith("task train-")
    assert sum(trajectory.segments[0].mask) == trajectory.sampled_tokens > 0
    assert {"init", "run", "reward"} <= trajectory.seconds.keys()
    again, _, complaint = finish(palestra("train", config))
    assert again == 2
    assert "holds a run already" in complaint
    assert complaint.count("\n") == 1


@pytest.mark.parametrize(("staleness", "between"), [(0, range(1, 9)), (1, range(6, 10))], ids=["on-policy", "stale"])
def test_kill_9_loses_nothing_and_trains_nothing_twice(config: Path, staleness: int, between: range) -> None:
    run = config.parent / "run"
    chance = random.Random(0)
    process = palestra("train", config, f"training.staleness={staleness}")
    seen: dict[Any, Any] = {}
    kills = 0
    while True:
        rows_wanted = len(seen) + chance.choice(between)
        if not wait_for_rows(process, run, rows_wanted):
            break
        process.kill()
        process.wait()
        kills += 1
        rows = read(run)
        for key, trajectory in seen.items():
            assert rows[key][1] == trajectory, f"{key} was lost or sampled again"
        seen = {key: trajectory for key, (_, trajectory) in rows.items()}
        process = palestra("train", "--resume", run)
    code, _, err = finish(process)
    assert code == 0, err
    assert kills >= 2
    assert_complete(run)
    rows = read(run)
    for key, trajectory in seen.items():
        assert rows[key][1] == trajectory, f"{key} was lost or sampled again"
    assert all(0 <= age <= staleness for age in ages(run))


def ages(run: Path) -> Iterator[int]:
    """How many updates lie between each trained trajectory's first token and its training."""
    columns = "step, task_id, idx, settled_by"
    with sqlite3.connect(run / "ledger.sqlite") as db:
        rows = db.execute(f"SELECT {columns} FROM trajectories WHERE phase = 'train'").fetchall()
    db.close()
    settled = {(step, task.decode(), index): by for step, task, index, by in rows}
    for key, (_, trajectory) in read(run).items():
        if key.phase == "train":
            version = next(version for version in trajectory.segments[0].versions if version >= 0)
            yield settled[key.step, key.task_id, key.index] - version


def wait_for_rows(process: subprocess.Popen[str], run: Path, count: int) -> bool:
    """Wait until so many trajectories are recorded. False when the run came to its end first."""
    path = run / "ledger.sqlite"
    while process.poll() is None:
        if path.exists():
            with Ledger.open(path, read_only=True) as ledger:
                if sum(sum(states.values()) for states in ledger.counts().values()) >= count:
                    return True
        time.sleep(0.005)
    return False


def test_ctrl_c_drains_and_saves_and_the_run_goes_on(config: Path) -> None:
    run = config.parent / "run"
    process = palestra("train", config)
    assert wait_for_rows(process, run, 5)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130, err
    assert "--resume" in out
    before = read(run)
    code, _, err = finish(palestra("train", "--resume", run))
    assert code == 0, err
    assert_complete(run)
    after = read(run)
    assert all(after[key][1] == trajectory for key, (_, trajectory) in before.items())


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ([signal.SIGTERM] * 2, 143),
        ([signal.SIGINT] * 4, 130),
        ([signal.SIGTERM, signal.SIGINT, signal.SIGINT], 143),
        ([signal.SIGINT, signal.SIGINT, signal.SIGTERM], 130),
    ],
    ids=["term", "int", "term-int", "int-term"],
)
def test_whoever_insists_waits_until_everything_is_closed(config: Path, signals: list[signal.Signals], code: int) -> None:
    said = config.parent / "said"
    process = palestra("train", config, "tasks.train=task:guarded", "evaluation.tasks=1", "evaluation.greedy=false")
    while process.poll() is None and not (said.exists() and said.read_text().count("close") >= GROUPS * SAMPLES):
        time.sleep(0.05)  # their runs are over, and their rewards have begun
    for each in signals:
        process.send_signal(each)
        time.sleep(0.1)
    ended, _, err = finish(process)
    assert ended == code, err
    assert "Traceback" not in err
    assert said.read_text().count("open") == said.read_text().count("close") > GROUPS * SAMPLES


def test_a_control_with_shuffled_rewards_runs(config: Path) -> None:
    code, _, err = finish(palestra("train", config, "training.shuffle_rewards=true", "training.steps=1"))
    assert code == 0, err


@pytest.mark.skipif(
    shutil.which("mount") is None or os.geteuid() != 0, reason="a full disk is made with a small tmpfs, which needs root"
)
def test_a_full_disk_says_so_in_one_line_and_the_run_goes_on_afterwards(config: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", disk], check=False, capture_output=True).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        run = disk / "run"
        code, _, complaint = finish(palestra("train", config, f"run.folder={run}"))
        assert code == 2, complaint
        assert complaint.count("\n") == 1
        assert "nothing recorded" in complaint
        before = read(run)
        subprocess.run(["mount", "-o", "remount,size=60m", disk], check=True)
        code, _, err = finish(palestra("train", "--resume", run))
        assert code == 0, err
        assert_complete(run)
        after = read(run)
        assert all(after[key][1] == trajectory for key, (_, trajectory) in before.items())
    finally:
        subprocess.run(["umount", "-l", disk], check=False)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("-> Finish:", "-> Finish:"), None),
        (("def finish(answer: str)", "def finish(answer)"), "has no type hint; write e.g. `answer: str`"),
        (("return float(", "return str("), "must return a finite number"),
        (("    async def score", "    def score"), "must be asynchronous"),
    ],
)
def test_a_wrong_task_is_told_in_one_line(config: Path, change: tuple[str, str], expected: str | None) -> None:
    task = config.parent / "task.py"
    task.write_text(task.read_text().replace(*change, 1))
    code, _, err = finish(palestra("train", config, "training.steps=1"))
    if expected is None:
        assert code == 0, err
    else:
        assert code == 2
        assert expected in err
        assert err.count("\n") == 1
