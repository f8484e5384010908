"""One multi-turn GRPO step of TRL's `GRPOTrainer` on the CPU, at the fastest settings found: the peer of `palestra bench engine`.

Run it as a process of its own (`python -m palestra.bench.trl_peer --help`), so that its CPU-seconds and memory are its own.
The episode: a word problem, calls of `calculator`, then `finish`. Everything measured goes to a JSON file, step by step.
"""

import argparse
import json
import re
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template
from trl.trainer import grpo_trainer

from palestra.backends.torch.model import keep_freed_memory

# SmolLM2's own template knows no tools. This one writes what `palestra.render.hermes` writes, without the tools' schemas:
# the system prompt shows the calls.
CHAT_TEMPLATE = r"""
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' -}}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
{{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' else '' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\n' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '\n' if message.content or not loop.first else '' -}}
{{- '<tool_call>\n' + call.function | tojson + '\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{{- '<|im_start|>assistant\n' if add_generation_prompt else '' -}}
"""


class Tasks(TypedDict):
    """The task file. A question is `{"question": ..., "answer": ...}`."""

    system: str
    questions: list[dict[str, str]]
    samples: int
    temperature: float
    lora_rank: int
    lora_alpha: int
    learning_rate: float
    turns: int


def calculator(expression: str) -> str:
    """Compute a whole-number expression with +, - and *.

    Args:
        expression: such as 12 + 7
    """
    try:
        if re.fullmatch(r"[-+*() 0-9]+", expression) and "**" not in expression:
            return str(eval(expression))
    except (SyntaxError, TypeError):
        pass
    return f"cannot compute {expression[:60]!r}; write an expression such as 12 + 7"


def finish(answer: str) -> str:
    """Hand in the answer.

    Args:
        answer: the number
    """
    raise AssertionError("never called: see `stopping_at_finish`")


def correct(completions: list[list[dict[str, Any]]], answer: list[str], **_: object) -> list[float]:
    """The reward: 1 when the episode finished with the right answer."""
    given = [str(episode[-1].get("finished")).strip() for episode in completions]
    return [float(one == right) for one, right in zip(given, answer, strict=True)]


def stopping_at_finish(parse: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The one patch of TRL: as it comes, it samples and trains another turn after `finish`, as after any other call.

    Its loop goes on while the parsed reply holds `tool_calls`, so a reply that finishes is handed over without them.
    """

    def parse_response(*args: object, **kwargs: object) -> dict[str, Any]:
        reply = parse(*args, **kwargs)
        for call in reply.get("tool_calls") or ():
            if call["function"]["name"] == "finish":
                arguments = call["function"]["arguments"]
                answer = arguments.get("answer") if isinstance(arguments, dict) else None
                return {**reply, "tool_calls": None, "finished": answer}
        return reply

    return parse_response


class Meter(TrainerCallback):  # type: ignore[misc]
    """What each step cost and did: around the whole step as a callback, and around TRL's sampling as a wrapper."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.steps.append({"turns": 0, "sampled_tokens": 0})
        self._begun = time.process_time(), time.perf_counter(), _machine_cpu_seconds()

    def on_step_end(self, *_: object, **__: object) -> None:
        step, (cpu, wall, machine) = self.steps[-1], self._begun
        step["cpu_seconds"] = time.process_time() - cpu
        step["training_cpu_seconds"] = step["cpu_seconds"] - step["generation_cpu_seconds"]
        step["wall_seconds"] = time.perf_counter() - wall
        # Threads that spin for one another on cores which others use burn many times the CPU: trust a step only if this is small.
        step["others_cpu_seconds"] = _machine_cpu_seconds() - machine - step["cpu_seconds"]
        step["peak_rss_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    def watch(self, trainer: Any) -> None:
        generate, score = trainer._generate_single_turn, trainer._generate_and_score_completions

        def generate_single_turn(*args: object, **kwargs: object) -> Any:
            replies, logprobs = generate(*args, **kwargs)
            self.steps[-1]["turns"] += len(replies)
            self.steps[-1]["sampled_tokens"] += sum(map(len, replies))
            return replies, logprobs

        def generate_and_score(inputs: list[dict[str, Any]]) -> dict[str, Any]:
            begun = time.process_time()
            batch: dict[str, Any] = score(inputs)
            step, prompt, completion = self.steps[-1], batch["prompt_mask"], batch["completion_mask"]
            step["generation_cpu_seconds"] = time.process_time() - begun
            step["episodes"] = len(inputs)
            step["turns_per_episode"] = step["turns"] / len(inputs)
            step["sampled_tokens_per_episode"] = step["sampled_tokens"] / len(inputs)
            step["trained_tokens"] = int((completion * batch["tool_mask"]).sum())
            step["forward_tokens"] = int(prompt.sum() + completion.sum())
            step["forward_tokens_with_padding"] = prompt.numel() + completion.numel()
            step["episodes_with_advantage"] = int((batch["advantages"] != 0).sum())
            step["mean_reward"] = trainer._metrics["train"]["reward"][-1]
            return batch

        trainer._generate_single_turn, trainer._generate_and_score_completions = generate_single_turn, generate_and_score


def _machine_cpu_seconds() -> float:
    """What all processes have used: user, nice, system, and interrupts, in hundredths of a second."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return sum(ticks[index] for index in (0, 1, 2, 5, 6)) / 100


def build(model: Path, tasks: Tasks, weights: str, max_tokens: int, micro_batch: int, steps: int, folder: str) -> Any:
    """The trainer whose every step takes `samples` episodes of each question."""
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = qwen3_template  # reads Hermes calls out of ChatML turns
    shape = AutoConfig.from_pretrained(model)
    if hasattr(shape, "quantization_config"):  # left behind by a conversion from GGUF; the weights themselves are dense
        del shape.quantization_config
    dtype = torch.bfloat16 if weights == "bfloat16" else torch.float32
    base = AutoModelForCausalLM.from_pretrained(model, config=shape, dtype=dtype)
    lora = LoraConfig(r=tasks["lora_rank"], lora_alpha=tasks["lora_alpha"], target_modules="all-linear", task_type="CAUSAL_LM")
    prompts = [
        {
            "prompt": [{"role": "system", "content": tasks["system"]}, {"role": "user", "content": item["question"]}],
            "answer": item["answer"],
        }
        for item in tasks["questions"]
    ]
    config = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=weights == "autocast",
        gradient_checkpointing=False,
        disable_dropout=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        max_steps=steps,
        learning_rate=tasks["learning_rate"],
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=tasks["temperature"],
        num_generations=tasks["samples"],
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=len(prompts) * tasks["samples"] // micro_batch,
        pad_to_multiple_of=None,
        max_completion_length=2048,  # of a whole episode, results included; far more than the turns can fill
        generation_kwargs={"max_new_tokens": max_tokens},  # of one turn
        max_tool_calling_iterations=tasks["turns"] - 1,
    )
    return GRPOTrainer(
        # With `peft_config` TRL would keep the adapter in float32 beside bfloat16 weights, which is slower.
        model=get_peft_model(base, lora, autocast_adapter_dtype=False),
        reward_funcs=correct,
        args=config,
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
        tools=[calculator, finish],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a model folder in the format of transformers")
    parser.add_argument("--tasks", type=Path, required=True, help="the task file")
    parser.add_argument("--weights", choices=["bfloat16", "autocast"], default="bfloat16", help="autocast: float32 weights")
    parser.add_argument("--max-tokens", type=int, default=40, help="the limit of a turn")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps; the first warms up")
    parser.add_argument("--micro-batch", type=int, default=4, help="episodes in one forward and backward pass")
    parser.add_argument("--json", type=Path, required=True, help="where the result goes")
    args = parser.parse_args()
    tasks: Tasks = json.loads(args.tasks.read_text(encoding="utf-8"))
    keep_freed_memory()  # as our own engine does; without it TRL's training takes up to 1.6 times the CPU
    grpo_trainer.parse_response = stopping_at_finish(grpo_trainer.parse_response)
    meter = Meter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(args.model, tasks, args.weights, args.max_tokens, args.micro_batch, args.steps, folder)
        trainer.add_callback(meter)
        meter.watch(trainer)
        trainer.train()
    settings = {"weights": args.weights, "threads": torch.get_num_threads(), "micro_batch": args.micro_batch}
    result = {**settings, **meter.steps[-1], "steps": meter.steps}  # the last step is the figure, the earlier ones warm up
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
