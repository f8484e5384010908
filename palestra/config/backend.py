"""Where tokens are sampled and gradients taken: one section for each backend, and one for the one that is chosen."""

from collections.abc import Callable
from math import inf
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from palestra.config.backend_section import BackendSection, Lora, Model, Only
from palestra.config.openai import OpenAI
from palestra.config.section import Located
from palestra.errors import nearest


class Torch(BackendSection):
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


class Scripted(BackendSection):
    """Plays given replies. For tests."""

    kind: Literal["scripted"]
    script: str
    """A function from all said so far (as text) to the next reply, as `module:object`."""
    model: Model
    """The folder with the tokenizer that turns the text into tokens."""
    renderer: Literal["auto", "hermes", "qwen3", "llama3", "jinja"] = "auto"
    thinking: Literal["keep", "off"] = "off"


class Tinker(BackendSection):
    """The Tinker API: the hosted service, or any server that speaks it."""

    kind: Literal["tinker"]
    model: Model
    """The base model, as the server knows it."""
    tokenizer: Model | None = None
    """The folder or hub name of its tokenizer, where that is not the model's own."""
    renderer: Literal["auto", "hermes", "qwen3", "llama3", "jinja"] = "auto"
    thinking: Literal["keep", "off"] = "off"
    base_url: str | None = None
    """The server's address; when not given, the hosted service's."""
    server: Literal["tinker", "skyrl"] = "tinker"
    """How the server sums up a loss: as the hosted service does, or as SkyRL's does."""
    rank: PositiveInt = 16
    """Of the LoRA adapter."""
    seconds: PositiveFloat = 300.0
    """How long to wait for one answer."""

    environment: ClassVar[str | None] = "tinker"
    only: ClassVar[tuple[Only, ...]] = (
        Only("sampling.temperature", (1.0, 0.0), "gives logprobs at temperature 1 whatever it samples at"),
        Only("loss.kind", ("importance_sampling", "ppo", "cispo", "cross_entropy"), "has no such loss"),
        Only("loss.dual_clip", (None,), "clips once"),
        Only("loss.kl", (0.0,), "knows no reference"),
        Only("loss.truncate", (None,), "does not tell sampler and trainer apart"),
    )

    def limits(self) -> tuple[Only, ...]:
        if self.server == "tinker":
            return self.only
        return (
            *self.only,
            Only("training.max_grad_norm", (inf,), 'does not clip gradients with server = "skyrl"'),
            Only("training.staleness", (0,), 'has one set of weights to sample and to train with server = "skyrl"'),
        )


class Verl(BackendSection):
    """verl drives us: its trainer samples on its own servers, through our agent, and takes the gradients."""

    environment: ClassVar[str | None] = "verl"
    only: ClassVar[tuple[Only, ...]] = (
        Only("loss.kind", ("importance_sampling", "ppo", "gspo", "cispo"), "trains by RL only"),
        Only("training.segment_weight", ("segment",), "counts every segment as one sequence"),
        Only("training.staleness", (0,), "is driven on-policy"),
        Only("training.refill", (False,), "takes the groups of a step as they are"),
        Only("training.oversample", (1.0,), "waits for every group of a step"),
        Only("training.shuffle_rewards", (False,), "computes advantages from the rewards of their own attempts"),
        Only("warm_start", (None,), "has no supervised steps in a run"),
    )

    kind: Literal["verl"]
    model: Model
    """A folder or a hub name."""
    renderer: Literal["auto", "hermes", "qwen3", "llama3", "jinja"] = "auto"
    thinking: Literal["keep", "off"] = "off"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    threads: NonNegativeInt = 0
    """CPU threads of each process; 0 leaves it to Ray, which gives them one."""
    train: Literal["lora", "full"] = "lora"
    """Train an adapter, or all weights."""
    lora: Lora = Lora()
    pack_tokens: PositiveInt = 16_384
    """Tokens of one training pass on one device."""
    gpus: PositiveInt = 1
    """GPUs of each node; without any, so many processes on the CPU."""
    nodes: PositiveInt = 1
    sequence_parallel: PositiveInt = 1
    """GPUs that share each sequence in training (Ulysses)."""
    server: Literal["auto", "vllm", "sglang", "embedded"] = "auto"
    """What samples: vLLM or SGLang on GPUs, our own sampler where there is none."""
    tensor_parallel: PositiveInt = 1
    """GPUs of one server."""
    workers: PositiveInt = 1
    """Processes that run agents; the limits of [dispatch] hold in each."""
    stall_seconds: PositiveFloat = 1800.0
    """When no rollout has ended for so long, the run ends with an error."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """verl's own keys, such as "actor_rollout_ref.rollout.gpu_memory_utilization", for what has no key here."""


class Skyrl(BackendSection):
    """SkyRL-train drives: its trainer, its workers and its engines. Palestra makes the rollouts."""

    kind: Literal["skyrl"]
    model: Model
    """A folder or a hub name."""
    renderer: Literal["auto", "hermes", "qwen3", "llama3", "jinja"] = "auto"
    thinking: Literal["keep", "off"] = "off"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    train: Literal["lora", "full"] = "lora"
    lora: Lora = Lora()
    micro_batch: PositiveInt | None = None
    """Sequences of one training pass; when not given, the most up to 8 that divide the attempts of a step."""
    seconds: PositiveFloat = 300.0
    """Time for one reply. An engine that takes longer has failed, and the rollout is tried again."""
    threads: NonNegativeInt = 0
    """Without a GPU: CPU threads; 0 leaves it to torch."""
    kv_tokens: PositiveInt = 131_072
    """Without a GPU: tokens whose keys and values the sampler may keep."""
    gpus: PositiveInt = 1
    """GPUs of each node of the trainer."""
    nodes: PositiveInt = 1
    sequence_parallel: PositiveInt = 1
    """GPUs that share each sequence in training (Ulysses)."""
    tensor_parallel: PositiveInt = 1
    """GPUs of one engine."""
    engines: PositiveInt | None = None
    """vLLM engines; when not given, as many as fit on the trainer's GPUs."""
    colocate: bool = True
    """Trainer and engines take turns on the same GPUs; with staleness they never do."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """SkyRL's own settings by their dotted names, where Palestra has no key for them."""

    environment: ClassVar[str | None] = "skyrl"
    only: ClassVar[tuple[Only, ...]] = (
        Only("warm_start", (None,), "begins with the model that it is given"),
        Only("loss.kind", ("ppo", "importance_sampling", "gspo", "cispo"), "computes an advantage for every loss"),
        Only("loss.kl", (0.0,), "averages a KL over sequences, those that are not trained on included"),
        Only("training.warmup_steps", (0,), "would begin a warm-up at a learning rate of 0"),
        Only("training.segment_weight", ("segment",), "weighs every sequence as 1"),
        Only("training.refill", (False,), "draws whole batches again instead of groups"),
        Only("training.oversample", (1.0,), "waits for every group that it asked for"),
        Only("training.shuffle_rewards", (False,), "computes advantages from the rewards as they are"),
    )


AnyBackend = Torch | Scripted | Tinker | Verl | Skyrl | OpenAI

KINDS: dict[str, type[BackendSection]] = {
    "torch": Torch,
    "scripted": Scripted,
    "tinker": Tinker,
    "verl": Verl,
    "skyrl": Skyrl,
    "openai": OpenAI,
}


def _of_its_kind(value: object) -> object:
    """The section with the keys of `[backend.KIND]` for its kind. So one file serves several kinds; what it says of the others is
    looked at too, and not used."""
    if not isinstance(value, dict):
        return value
    tables = {kind: value[kind] for kind in KINDS if isinstance(value.get(kind), dict)}
    shared = {key: held for key, held in value.items() if key not in tables}
    for kind, table in tables.items():
        known = KINDS[kind].model_fields
        for key in table:
            if key not in known or key == "kind":
                raise ValueError(f"unknown key 'backend.{kind}.{key}'{nearest(key, known)}")
            if key in shared:
                raise ValueError(f"{key!r} is in [backend] and in [backend.{kind}]; write it in one of them")
    return shared | tables.get(str(shared.get("kind")), {})


Backend = Annotated[AnyBackend, Field(discriminator="kind"), pydantic.BeforeValidator(_of_its_kind)]


def refuse_what_cannot_be_honoured(backend: AnyBackend, value_of: Callable[[str], Any]) -> None:
    """`value_of` gives the value of a key such as `loss.kl`, or None where its section is not there."""
    for knob in backend.limits():
        value = value_of(knob.key)
        if value is not None and value not in knob.values:
            right = " or ".join("unset" if v is None else repr(v) for v in knob.values)
            raise ValueError(f"{knob.key} = {value!r}: the backend {backend.kind!r} {knob.why}; it must be {right}")
