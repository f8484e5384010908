"""Where tokens are sampled and gradients taken: one section for each backend."""

from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from palestra.config.section import Located, Section


def _locate_model(name: str) -> str:
    folder = Path(name).expanduser()
    return str(folder.resolve()) if folder.is_dir() else name


Model = Annotated[str, pydantic.AfterValidator(_locate_model)]


class Lora(Section):
    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0


class Torch(Section):
    """The embedded backend."""

    kind: Literal["torch"] = "torch"
    model: Model = "smollm2-135m-instruct"
    """A folder, a hub name, or `smollm2-135m-instruct`, which comes from a Python package."""
    renderer: Literal["auto", "hermes", "qwen3", "llama3", "jinja"] = "auto"
    thinking: Literal["keep", "off"] = "off"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    device: str = "auto"
    threads: NonNegativeInt = 0
    """CPU threads; 0 leaves it to torch."""
    train: Literal["lora", "full"] = "lora"
    """Train an adapter, or all weights."""
    lora: Lora = Lora()
    adapter: Located | None = None
    """A PEFT adapter to start from, with the rank given above."""
    kv_tokens: PositiveInt = 131_072
    """Tokens whose keys and values the sampler may keep."""
    pack_tokens: PositiveInt = 4096
    """Tokens of one training pass, counted once where sequences share them."""


class Scripted(Section):
    """Plays given replies. For tests."""

    kind: Literal["scripted"]
    script: str
    """A function from all said so far (as text) to the next reply, as `module:object`."""
    model: Model
    """The folder with the tokenizer that turns the text into tokens."""
    renderer: Literal["auto", "hermes", "qwen3", "llama3", "jinja"] = "auto"
    thinking: Literal["keep", "off"] = "off"


Backend = Annotated[Torch | Scripted, Field(discriminator="kind")]
