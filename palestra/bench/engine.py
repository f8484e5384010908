"""`palestra bench engine`: the embedded engine against transformers' `generate`, and a whole GRPO step against TRL's."""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from palestra import interrupts
from palestra.backends.torch import model as models
from palestra.backends.torch.sampler import TorchSampler
from palestra.bench.step import measure_own_step, write_trl_tasks
from palestra.errors import UsageError
from palestra.protocols import Sampling

SEQUENCES, PROMPT, NEW = 48, 367, 36
TEMPERATURE = 0.7
REPEATS = 3
PEER_SECONDS = 1800


def bench_engine(console: Console, with_trl: bool = True) -> dict[str, Any]:
    if with_trl and not all(find_spec(package) for package in ("trl", "datasets", "accelerate")):
        raise UsageError("the comparison with TRL needs its packages: pip install 'palestra[bench]', or use --skip-trl")
    models.keep_freed_memory()
    folder = models.locate(models.DEFAULT)
    console.print(f"generation: {SEQUENCES} sequences, a shared prompt of {PROMPT} tokens, {NEW} new tokens each, bfloat16")
    figures = {"threads": torch.get_num_threads(), **_generation(folder, console)}
    console.print("a GRPO step: 6 tasks × 8 attempts of the quickstart recipe")
    figures["step"] = measure_own_step()
    console.print(f"  palestra: {figures['step']['cpu_seconds']:.1f} CPU-s, {figures['step']['sampled_tokens']} tokens sampled")
    if with_trl:
        figures.update(_against_trl(folder, figures["step"], console))
    return figures


def _generation(folder: Path, console: Console) -> dict[str, Any]:
    prompt = torch.randint(100, 40_000, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()
    theirs = _measure_generate(folder, prompt)
    ours = interrupts.run(_measure_sampler(folder, prompt))
    for name, figures in (("transformers", theirs), ("palestra", ours)):
        parts = f"prefill {figures['prefill']:.2f}, decode {figures['decode']:.2f}"
        console.print(f"  {name}: {figures['total']:.1f} CPU-s ({parts})")
    return {
        "generate_ratio": theirs["total"] / ours["total"],
        "decode_ratio": theirs["decode"] / ours["decode"],
        "generate_cpu_seconds": {"transformers": theirs, "palestra": ours},
    }


def _measure_generate(folder: Path, prompt: list[int]) -> dict[str, float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = torch.tensor([prompt] * SEQUENCES)

    def generate(new: int) -> float:
        started = time.process_time()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=TEMPERATURE,
                top_k=0,
                max_new_tokens=new,
                min_new_tokens=new,
                pad_token_id=0,
            )
        return time.process_time() - started

    generate(2)  # warm up
    return _split(min(generate(1) for _ in range(REPEATS)), min(generate(NEW) for _ in range(REPEATS)))


async def _measure_sampler(folder: Path, prompt: list[int]) -> dict[str, float]:
    sampler = TorchSampler(models.load(folder, torch.bfloat16, torch.device("cpu")), kv_tokens=131_072)
    sampler.start()

    async def one(index: int, new: int) -> None:
        async with sampler.session(index, PROMPT + new) as session:
            await session.sample(prompt, Sampling(TEMPERATURE, new))

    async def generate(new: int) -> float:
        sampler.replace_weights({}, sampler.version + 1)  # so that nothing computed before is used
        started = time.process_time()
        await asyncio.gather(*(one(index, new) for index in range(SEQUENCES)))
        return time.process_time() - started

    try:
        await generate(2)
        return _split(await _least(generate, 1), await _least(generate, NEW))
    finally:
        sampler.close()


async def _least(measure: Callable[[int], Awaitable[float]], new: int) -> float:
    return min([await measure(new) for _ in range(REPEATS)])


def _split(first_token: float, total: float) -> dict[str, float]:
    return {"total": total, "prefill": first_token, "decode": total - first_token}


def _against_trl(folder: Path, own: dict[str, Any], console: Console) -> dict[str, Any]:
    peers = {}
    for weights in ("bfloat16", "autocast"):
        peers[weights] = _run_trl(folder, weights)
        console.print(
            f"  TRL, {weights}: {peers[weights]['cpu_seconds']:.1f} CPU-s, {peers[weights]['sampled_tokens']} tokens sampled"
        )
    best = min(peers.values(), key=lambda peer: peer["cpu_seconds"])
    raw = best["cpu_seconds"] / own["cpu_seconds"]
    # Episodes are sampled, so their lengths differ; the smaller of the two ratios is the one to quote.
    for_equal_tokens = raw * own["sampled_tokens"] / best["sampled_tokens"]
    ratio = min(raw, for_equal_tokens)
    console.print(
        f"  step ratio against the faster: {ratio:.1f} (for the step {raw:.1f}, for equal tokens {for_equal_tokens:.1f})"
    )
    return {"trl": peers, "step_ratio_trl": ratio, "step_ratio_trl_raw": raw, "step_ratio_trl_equal_tokens": for_equal_tokens}


def _run_trl(folder: Path, weights: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        tasks, result = Path(scratch) / "tasks.json", Path(scratch) / "result.json"
        write_trl_tasks(tasks)
        command = [sys.executable, "-m", "palestra.bench.trl_peer", "--model", str(folder), "--tasks", str(tasks)]
        command += ["--weights", weights, "--max-tokens", "40", "--steps", "1", "--json", str(result)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PEER_SECONDS, check=False)
        if done.returncode != 0:
            raise UsageError(
                f"the TRL peer failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}"
            )
        measured: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return measured
