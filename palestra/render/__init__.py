"""Messages to tokens and back, per model family. `load` picks the renderer of a model folder."""

from pathlib import Path
from typing import Literal

from palestra.errors import ModelError, nearest
from palestra.protocols import Renderer
from palestra.render.hermes import PLAIN, QWEN2_5, QWEN3, SMOLLM3, Dialect, Hermes
from palestra.render.jinja import Jinja
from palestra.render.llama3 import Llama3
from palestra.render.tokenizer import Tokenizer
from palestra.render.tokenizer import load as load_tokenizer

_DIALECTS: dict[str, Dialect] = {
    "chatml": PLAIN,
    "hermes": PLAIN,
    "qwen2.5": QWEN2_5,
    "qwen3": QWEN3,
    "smollm3": SMOLLM3,
}

FAMILIES = ("auto", *_DIALECTS, "llama3", "jinja")


def load(folder: Path, family: str = "auto", thinking: Literal["keep", "off"] = "off") -> Renderer:
    """The renderer for the model in `folder`. See `guess` for what "auto" does."""
    if family not in FAMILIES:
        raise ModelError(f"unknown model family {family!r}{nearest(family, FAMILIES)}")
    tokenizer = load_tokenizer(folder)
    if family == "auto":
        family = guess(tokenizer)
    if family in _DIALECTS:
        return Hermes(tokenizer, _DIALECTS[family], thinking)
    return Llama3(tokenizer) if family == "llama3" else Jinja(tokenizer, thinking)


def guess(tokenizer: Tokenizer) -> str:
    """The family, in this order:

    - ``smollm3`` by the `model_type` in config.json;
    - ChatML, when `<|im_start|>` is a marker and the template writes it: ``qwen3`` if it is a Qwen3 whose thinking can be
      switched, ``qwen2.5`` if its template introduces Qwen, ``jinja`` if it writes calls in a way of its own, else ``hermes``;
    - ``llama3``, when `<|start_header_id|>` and `<|eom_id|>` (new in 3.1) are markers and the template writes headers;
    - ``jinja`` for all others.
    """
    template = tokenizer.template or ""

    def writes(marker: str) -> bool:
        return marker in tokenizer.markers and (marker in template or not template)

    if tokenizer.model_type == "smollm3":
        return "smollm3"
    if writes("<|im_start|>") and "<|im_sep|>" not in tokenizer.markers:
        if "<function=" in template or ("tools" in template and "<tool_call>" not in template):
            return "jinja"
        if tokenizer.model_type in ("qwen3", "qwen3_moe") and ("enable_thinking" in template or not template):
            return "qwen3"
        return "qwen2.5" if QWEN2_5.default_system in template else "hermes"
    if writes("<|start_header_id|>") and "<|eom_id|>" in tokenizer.markers:
        return "llama3"
    return "jinja"
