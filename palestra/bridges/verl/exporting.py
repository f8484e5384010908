"""What verl has learned, in the form that every other run leaves: an adapter as PEFT loads it, or the whole model.

verl's own export of a model with an adapter has PEFT's wrapped names in it, which nothing else loads.
"""

import shutil
from pathlib import Path

from peft import LoraConfig
from safetensors.torch import load_file, save_file

from palestra.config import Verl


def export(checkpoint: Path, target: Path, section: Verl) -> None:
    """From a checkpoint of verl's actor."""
    source = checkpoint / "huggingface"
    shutil.rmtree(target, ignore_errors=True)
    if section.train == "full":
        shutil.copytree(source, target)
        return
    weights = {
        name.replace(".default.", "."): weight
        for file in sorted(source.glob("*.safetensors"))
        for name, weight in load_file(file).items()
        if ".lora_" in name
    }
    layers = {name.partition(".lora_")[0].rpartition(".")[2] for name in weights}
    config = LoraConfig(
        r=section.lora.rank,
        lora_alpha=section.lora.alpha,
        target_modules=sorted(layers),
        base_model_name_or_path=section.model,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    target.mkdir(parents=True)
    config.save_pretrained(target)
    save_file(weights, target / "adapter_model.safetensors", metadata={"format": "pt"})
