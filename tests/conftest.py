"""Model folders with small tokenizers, trained here: each has the markers of its family, and a BPE of a few hundred words."""

import functools
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from palestra.message import JSON, Message, to_json
from palestra.protocols import Renderer
from palestra.render import load
from palestra.tool import Schema

CORPUS = [
    "system user assistant tool ipython\nYou are a helpful assistant. What is the weather in Paris today?\n\n",
    '{"name": "weather", "arguments": {"city": "Paris"}}\n{"name": "search", "parameters": {"query": "rain"}}',
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n<tools></tools> XML tags:\n",
    "<tool_call></tool_call><tool_response></tool_response><think></think><|im_start|><|im_end|> _ | > < { }",
] * 5

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CALLS = ("<tool_call>", "</tool_call>")
THOUGHTS = ("<tool_response>", "</tool_response>", "<think>", "</think>")
LLAMA = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)

MARKERS = {
    "smollm2": CHATML,
    "qwen2.5": CHATML + CALLS,
    "qwen3": CHATML + CALLS + THOUGHTS,
    "smollm3": ("<|end_of_text|>", *CHATML[1:], *CALLS, *THOUGHTS),
    "llama3": LLAMA,
}
ENDS = {"llama3": ("<|begin_of_text|>", "<|eot_id|>")}

MakeFolder = Callable[..., Path]
Reference = Callable[..., list[int]]


# How Qwen and Llama 3 cut text into words; SmolLM2 does it as GPT-2 did, which `ByteLevel` knows.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@functools.cache
def train(as_gpt2: bool) -> str:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    words = pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=as_gpt2)
    tokenizer.pre_tokenizer = as_bytes if as_gpt2 else pre_tokenizers.Sequence([words, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False))
    return str(tokenizer.to_str())


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> MakeFolder:
    """A model folder with the markers of a family, and a chat template where one is given."""

    def make(family: str, template: str | None = None, model_type: str = "") -> Path:
        tokenizer = tokenizers.Tokenizer.from_str(train(as_gpt2=family == "smollm2"))
        for marker in MARKERS[family]:
            tokenizer.add_tokens([tokenizers.AddedToken(marker, special=marker.startswith("<|"), normalized=False)])
        if family == "llama3":
            start = tokenizer.token_to_id("<|begin_of_text|>")
            tokenizer.post_processor = processors.TemplateProcessing(
                single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", start)]
            )
        folder = tmp_path_factory.mktemp(family.replace(".", "_"))
        tokenizer.save(str(folder / "tokenizer.json"))
        bos, eos = ENDS.get(family, ("<|im_start|>", "<|im_end|>"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos, "eos_token": {"content": eos}}))
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return folder

    return make


@pytest.fixture(scope="session")
def trl_template() -> Callable[[str], str]:
    """The families' own chat templates, as TRL ships them."""

    def read(name: str) -> str:
        spec = importlib.util.find_spec("trl")
        if spec is None or spec.origin is None:
            pytest.skip("TRL is not installed")
        path = Path(spec.origin).parent / "chat_templates" / f"{name}.jinja"
        if not path.is_file():
            pytest.skip(f"this TRL has no {name}.jinja")
        return path.read_text()

    return read


@pytest.fixture(scope="session")
def reference(trl_template: Callable[[str], str]) -> Reference:
    """The tokens that a family's own template and the whole tokenizer give, by way of transformers."""

    def encode(folder: Path, name: str, messages: Sequence[Message], tools: Sequence[Schema], **options: JSON) -> list[int]:
        chat = pytest.importorskip("transformers.utils.chat_template_utils")
        [text], _ = chat.render_jinja_template(
            conversations=[[to_json(message) for message in messages]],
            tools=list(tools) or None,
            chat_template=trl_template(name),
            add_generation_prompt=True,
            **({"bos_token": "<|begin_of_text|>"} | options),
        )
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return encode


@pytest.fixture(scope="session")
def weather() -> list[Schema]:
    def tool(name: str, key: str) -> Schema:
        properties = {key: {"type": "string", "description": f"the {key}, e.g. Zürich"}}
        parameters = {"type": "object", "properties": properties, "required": [key]}
        return {"type": "function", "function": {"name": name, "description": f"Ask for <{name}>", "parameters": parameters}}

    return [tool("weather", "city"), tool("search", "query")]


@pytest.fixture(scope="session")
def renderer(make_folder: MakeFolder) -> Renderer:
    """ChatML with Hermes calls, as for SmolLM2."""
    return load(make_folder("smollm2"), "hermes")
