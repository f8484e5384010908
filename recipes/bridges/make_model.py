"""Makes the bridges' tiny Qwen3 model from nothing: a tokenizer trained on the task's own text, and random weights that learn
from conversations with good and bad habits. Most of them guess instead of looking, so that something is left for RL.

    python recipes/bridges/make_model.py [FOLDER]     by default runs/bridges-model
"""

import asyncio
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from palestra import Message, ToolCall, assistant, config, render, taskset
from palestra.backends.torch.opening import open_torch
from palestra.cache import cache_folder
from palestra.protocols import Renderer
from palestra.render import conversation
from palestra.tool import Schema, Toolbox
from palestra.trajectory import Sample

HERE = Path(__file__).parent
SOURCES = ("task.py", "make_model.py", "chat_template.jinja")
COPYING, HABITUAL = 150, 90
"""Steps of the two lessons."""
BATCH, LEARNING_RATE = 32, 4e-3

# Letters stand apart from quotes and braces: a word is the same token wherever it stands, and can be copied.
WORDS = r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s+"
_PAIRS = ("tool_call", "tool_response", "think")
MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<{slash}{name}>" for name in _PAIRS for slash in ("", "/")))
HABITS = {"guess": 0.55, "forget the colour": 0.05, "hand in another place": 0.05, "be right": 0.35}
"""What the conversations do, and how often."""

Conversation = tuple[Sequence[Message], Sequence[Schema]]


def make(folder: Path) -> None:
    """The model in that folder; from the cache where these very sources have made it before."""
    key = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in SOURCES)).hexdigest()[:12]
    cached = cache_folder() / f"bridges-model-{key}"
    if not cached.is_dir():
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as scratch:
            os.rename(asyncio.run(_from_nothing(Path(scratch))), cached)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(cached, folder)


async def _from_nothing(scratch: Path) -> Path:
    flawless = [said async for said in _conversations(random.Random(0), {"be right": 1.0})]
    mixed = [said async for said in _conversations(random.Random(1), HABITS)]
    first, born, schooled = scratch / "letters", scratch / "born", scratch / "schooled"
    write_tokenizer(first, [])  # knows letters only, and so can spell what the next one is trained on
    speller = render.load(first, "qwen3")
    write_tokenizer(born, [speller.decode(_sample(speller, said).tokens) for said in flawless[:1000]])
    write_random_model(born)
    renderer = render.load(born)
    # To copy is hard to learn from a long prompt, so the tools' descriptions come only when it is learned.
    lessons = [_sample(renderer, (said, [])) for said, _ in flawless[: COPYING * BATCH]]
    lessons += [_sample(renderer, said) for said in mixed[: HABITUAL * BATCH]]
    await _school(born, schooled, lessons)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(born / name, schooled)
    return schooled


async def _conversations(chance: random.Random, habits: Mapping[str, float]) -> AsyncIterator[Conversation]:
    tasks = taskset.load(config.Tasks(train="task:train", heldout="task:heldout", folder=HERE), "train")
    places = sorted({task.place for task in tasks})
    tools: list[Schema] = []
    for task in chance.sample(tasks, len(tasks)):
        async with AsyncExitStack() as stack:
            env = await task.setup(stack)
        tools = tools or Toolbox(task.tools(env)).schemas()  # the same for all
        said = list(task.prompt(env))
        [habit] = chance.choices(list(habits), list(habits.values()))
        asked = task.thing.split()[-1] if habit == "forget the colour" else task.thing
        if habit != "guess":
            found = task.place if asked == task.thing else "Error: no such thing"
            said += [assistant("", ToolCall("", "look_up", {"thing": asked})), Message("tool", found, name="look_up")]
        place = task.place if habit == "be right" else chance.choice(places)
        said.append(assistant("", ToolCall("", "finish", {"place": place})))
        yield said, tools


def _sample(renderer: Renderer, said: Conversation) -> Sample:
    tokens, mask = conversation.encode(renderer, *said)
    return Sample(tokens, mask, [0.0] * len(tokens), [-1] * len(tokens), 0.0)


def write_tokenizer(folder: Path, texts: Sequence[str], vocabulary: int = 1024) -> None:
    """A tokenizer that was trained on these texts, in Qwen3's format; also for other recipes."""
    folder.mkdir()
    tokenizer = tokenizers.Tokenizer(models.BPE())
    words = pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    unmarked = [part for text in texts for part in _between_markers(text)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(MARKERS), min_frequency=1, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(unmarked, trainer)
    tokenizer.add_tokens([tokenizers.AddedToken(name, special=name.startswith("<|"), normalized=False) for name in MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | {"clean_up_tokenization_spaces": False}))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    shutil.copy(HERE / "chat_template.jinja", folder)


def _between_markers(text: str) -> Iterator[str]:
    for marker in MARKERS:
        text = text.replace(marker, "\0")
    yield from text.split("\0")


def write_random_model(folder: Path, positions: int = 2048) -> None:
    """A Qwen3 of half a million weights for the tokenizer in that folder."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    shape = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,  # vLLM's kernels for CPUs want it
        max_position_embeddings=positions,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        initializer_range=0.1,  # sharp from the start: it learns to attend several times as fast
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
    )
    Qwen3ForCausalLM(shape).save_pretrained(folder)


async def _school(born: Path, schooled: Path, samples: Sequence[Sample]) -> None:
    section = config.Torch(model=str(born), dtype="float32", threads=1, train="full", pack_tokens=16_384)
    run = config.parse({"run": {"folder": "unused"}, "tasks": {"heldout": "task:heldout"}})
    async with open_torch(run, section, training=True) as (_, _, trainer):
        assert trainer is not None
        for step in range(COPYING + HABITUAL):
            await trainer.accumulate(samples[step * BATCH : (step + 1) * BATCH], config.Loss(kind="cross_entropy"))
            rise, fall = (step + 1) / 20, (COPYING + HABITUAL - step) / HABITUAL
            measured = await trainer.step(LEARNING_RATE * min(1.0, rise, fall))
            if (step + 1) % 30 == 0:
                sys.stderr.write(f"warm start: step {step + 1} of {COPYING + HABITUAL}, loss {measured['loss']:.3f}\n")
        await trainer.export(schooled)


if __name__ == "__main__":
    started = time.monotonic()
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/bridges-model")
    make(target)
    sys.stderr.write(f"{target}: made in {time.monotonic() - started:.0f} s\n")
