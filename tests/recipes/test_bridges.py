"""The recipe on which all backends are seen to learn: sound tasks, and a chat template that writes what the renderer writes."""

import asyncio
import importlib.util
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from palestra import check, config, render, taskset
from palestra.message import to_json
from palestra.render import conversation

RECIPE = Path(__file__).parents[2] / "recipes" / "bridges"
TOML = RECIPE / "train.toml"


def tasks(key: str) -> list[Any]:
    return taskset.load(config.load(TOML).tasks, key)


def test_no_training_task_is_about_a_thing_that_is_held_out() -> None:
    train, heldout = tasks("train"), tasks("heldout")
    assert len(heldout) >= 200
    assert len(train) > 4000
    assert not {task.thing for task in train} & {task.thing for task in heldout}


def test_gold_scores_1_and_doing_nothing_0(tmp_path: Path) -> None:
    result = check(TOML, f"run.folder={tmp_path}", sample=60)
    del result["seconds"]
    assert result == {"tasks": 60, "gold": 60, "noop": 60, "failures": {}}


@pytest.fixture(scope="module")
def make_model() -> ModuleType:
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("bridges_make_model", RECIPE / "make_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_chat_template_writes_what_the_renderer_writes(make_model: ModuleType, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    make_model.write_tokenizer(tmp_path / "model", [])
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "model"), render.load(tmp_path / "model")

    async def said(habit: str) -> Any:
        return await anext(make_model._conversations(random.Random(0), {habit: 1.0}))

    for habit in ("be right", "guess", "forget the colour"):
        messages, tools = asyncio.run(said(habit))
        tokens, _ = conversation.encode(ours, messages, tools)
        written = theirs.apply_chat_template([to_json(message) for message in messages], tools=tools, tokenize=False)
        assert written == ours.decode(tokens) + "\n"
        begun = theirs.apply_chat_template(
            [to_json(message) for message in messages[:-1]],
            tools=tools,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
        )
        assert begun == tokens[: len(begun)]
