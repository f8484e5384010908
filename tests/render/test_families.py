from collections.abc import Callable
from pathlib import Path

import pytest

from palestra.errors import ModelError
from palestra.message import user
from palestra.render import guess, load
from palestra.render.hermes import Hermes
from palestra.render.jinja import Jinja
from palestra.render.llama3 import Llama3
from palestra.render.tokenizer import load as load_tokenizer

MakeFolder = Callable[..., Path]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


@pytest.mark.parametrize(
    ("markers", "template", "model_type", "family"),
    [
        ("smollm2", None, "llama", "hermes"),
        ("smollm2", CHATML, "llama", "hermes"),
        ("smollm3", "<|im_start|> xml_tools <tool_call> enable_thinking", "smollm3", "smollm3"),
        ("qwen2.5", f"<|im_start|> {QWEN} tools <tool_call>", "qwen2", "qwen2.5"),
        ("qwen2.5", "<|im_start|> tools <tool_call>", "qwen2", "hermes"),
        ("qwen3", "<|im_start|> tools <tool_call> enable_thinking", "qwen3", "qwen3"),
        ("qwen3", "<|im_start|> tools <tool_call> enable_thinking", "qwen3_moe", "qwen3"),
        ("qwen3", None, "qwen3", "qwen3"),
        ("qwen3", "<|im_start|> tools <tool_call>", "qwen3", "hermes"),
        ("qwen3", "<|im_start|> tools <tool_call><function=x> enable_thinking", "qwen3_5", "jinja"),
        ("qwen3", "<|im_start|> tools <|tool_call_start|>", "lfm2", "jinja"),
        ("llama3", None, "llama", "llama3"),
        ("llama3", "<|start_header_id|> tools", "llama", "llama3"),
        ("llama3", "<User>", "llama", "jinja"),
        ("smollm2", "[INST]", "mistral", "jinja"),
    ],
)
def test_auto(make_folder: MakeFolder, markers: str, template: str | None, model_type: str, family: str) -> None:
    assert guess(load_tokenizer(make_folder(markers, template, model_type))) == family


def test_load_gives_the_renderer_of_the_family(make_folder: MakeFolder) -> None:
    assert isinstance(load(make_folder("smollm2", CHATML)), Hermes)
    assert isinstance(load(make_folder("smollm2", CHATML), "jinja"), Jinja)
    assert isinstance(load(make_folder("llama3")), Llama3)


def test_thinking_is_a_choice(make_folder: MakeFolder) -> None:
    folder = make_folder("qwen3", model_type="qwen3")
    off, keep = load(folder), load(folder, thinking="keep")
    assert off.decode(off.prompt([user("a")], [])) == keep.decode(keep.prompt([user("a")], [])) + "<think>\n\n</think>\n\n"


def test_an_unknown_family_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="unknown model family 'lama3'; did you mean 'llama3'"):
        load(tmp_path, "lama3")
