"""The trained adapter in plain transformers and PEFT: the held-out problems again, with none of Palestra's engine.

    python recipes/quickstart/in_transformers.py runs/quickstart/adapter

Only the task's own code, the renderer and the tools are Palestra's; the model is loaded and run by the other two libraries.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from task import WordProblem, heldout
from transformers import AutoModelForCausalLM

from palestra import Finish, Message, ToolError, render
from palestra.statistics import mean
from palestra.tool import Toolbox
from palestra.trajectory import Segment

TASKS, TURNS, MAX_TOKENS, BATCH = 100, 4, 40, 25


def main(adapter: Path) -> None:
    folder = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), adapter).eval()
    problems = list(heldout())[:TASKS]
    renderer = render.load(Path(folder))
    right = []
    for start in range(0, TASKS, BATCH):
        right += asyncio.run(solve(model, renderer, problems[start : start + BATCH]))
        sys.stdout.write(f"{len(right)} problems, greedy success {mean(right)}\n")


async def solve(model: Any, renderer: Any, problems: list[WordProblem]) -> list[float]:
    toolboxes = {problem.id: Toolbox(problem.tools(None)) for problem in problems}
    segments = {problem.id: Segment() for problem in problems}
    for problem in problems:
        segments[problem.id].read(renderer.prompt(problem.prompt(None), toolboxes[problem.id].schemas()))
    answers: dict[str, object] = {}
    active = list(problems)
    for _ in range(TURNS):
        replies = generate(model, [segments[problem.id].tokens for problem in active], renderer.stop_ids) if active else []
        unfinished = []
        for problem, reply in zip(active, replies, strict=True):
            outcome = await answer(renderer.parse(reply), toolboxes[problem.id])
            if isinstance(outcome, Finish):
                answers[problem.id] = outcome.answer
            elif outcome:
                finish = "stop" if reply[-1] in renderer.stop_ids else "length"
                segments[problem.id].read([*reply, *renderer.follow(finish, outcome)])
                unfinished.append(problem)
        active = unfinished
    return [float(str(answers.get(problem.id)).strip() == str(problem.answer)) for problem in problems]


async def answer(message: Message, tools: Toolbox) -> Finish | list[Message]:
    results = []
    for call in message.calls:
        try:
            outcome = await tools.run(call)
        except ToolError as error:
            outcome = f"Error: {error}"
        if isinstance(outcome, Finish):
            return outcome
        results.append(Message("tool", str(outcome), call_id=call.id, name=call.name))
    return results


def generate(model: Any, prompts: list[list[int]], stop_ids: frozenset[int]) -> list[list[int]]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        stops = sorted(stop_ids)
        out = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=MAX_TOKENS, eos_token_id=stops, pad_token_id=0
        )
    replies = []
    for row in out[:, longest:].tolist():
        ends = [i for i, token in enumerate(row) if token in stop_ids]
        replies.append(row[: ends[0] + 1] if ends else row)
    return replies


if __name__ == "__main__":
    main(Path(sys.argv[1]))
