"""Where tokens are sampled and gradients taken: one section for each backend."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

import pydantic
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from palestra.config.section import Located, Section


def _locate_model(name: str) -> str:
    folder = Path(name).expanduser()
    return str(folder.resolve()) if folder.is_dir() else name


Model = Annotated[str, pydantic.AfterValidator(_locate_model)]


@dataclass(frozen=True)
class Only:
    """A key of the config, anywhere in the file, of which a backend can honour these values only."""

    key: str
    values: tuple[object, ...]
    why: str
    """Completes "the backend …"."""


class BackendSection(Section):
    """What the section of every backend says of itself, beside its keys."""

    environment: ClassVar[str | None] = None
    """The environment of its own that it runs in, by its name in `environments.py`."""
    only: ClassVar[tuple[Only, ...]] = ()
    """What it cannot honour: a config with any other value is refused when it is loaded."""

    def limits(self) -> tuple[Only, ...]:
        """That, and what more its own keys rule out."""
        return self.only


class Lora(Section):
    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0


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


class Prices(Section):
    """What a million tokens cost, in whatever currency."""

    input: NonNegativeFloat = 0.0
    cached_input: NonNegativeFloat | None = None
    """Of those that the server had read before; as the others when not given."""
    output: NonNegativeFloat = 0.0


class OpenAI(BackendSection):
    """A model behind an OpenAI-compatible server. It samples; it cannot train."""

    kind: Literal["openai"]
    base_url: str
    """Where the server's API begins, such as `https://api.example.com/v1`."""
    model: str
    """The model as the server calls it."""
    key_variable: str | None = None
    """The environment variable that holds the key; without it none is sent."""
    mode: Literal["chat", "tokens"] = "chat"
    """The server renders messages and parses calls, or takes and gives token ids."""
    tokenizer: Model | None = None
    """With tokens: the folder with the tokenizer of the model that is served."""
    renderer: Literal["auto", "hermes", "qwen3", "llama3", "jinja"] = "auto"
    thinking: Literal["keep", "off"] = "off"
    strict: bool = False
    """With chat: schemas in strict mode, which the server must know."""
    token_ids: bool = False
    """With chat: ask for the token ids and record them, which the server must know (vLLM does)."""
    limit_key: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """With chat: under which name the limit of a reply is sent."""
    omit: Annotated[frozenset[Literal["temperature", "seed"]], pydantic.PlainSerializer(sorted)] = frozenset()
    """With chat: what is not sent, for servers that refuse it."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """With chat: further fields of each request, such as `reasoning_effort`."""
    concurrency: PositiveInt = 16
    """Conversations at once."""
    requests_per_minute: PositiveFloat | None = None
    tokens_per_minute: PositiveFloat | None = None
    seconds: PositiveFloat = 120.0
    """Time for one answer, after which it is asked for again."""
    patience: PositiveFloat = 300.0
    """How long a request that failed is tried again."""
    prices: Prices = Prices()

    def limits(self) -> tuple[Only, ...]:
        return (Only("sampling.temperature", (1.0,), "does not send it, as omit says"),) if "temperature" in self.omit else ()

    @pydantic.field_validator("base_url")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ValueError("give an address such as https://api.example.com/v1, without a key in it")
        return value.rstrip("/")

    @pydantic.field_validator("key_variable")
    @classmethod
    def _is_a_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):  # it may be the key itself: do not repeat it
            raise ValueError("give the name of an environment variable such as OPENAI_API_KEY, not the key itself")
        return value

    @pydantic.model_validator(mode="after")
    def _goes_together(self) -> "OpenAI":
        if self.mode == "tokens" and self.tokenizer is None:
            raise ValueError('mode = "tokens" needs backend.tokenizer, the folder with the tokenizer of the model that is served')
        alien = CHAT_ONLY if self.mode == "tokens" else TOKENS_ONLY
        defaults = type(self).model_construct()
        wrong = next((key for key in alien if getattr(self, key) != getattr(defaults, key)), None)
        if wrong is not None:
            raise ValueError(f'backend.{wrong} does not go with mode = "{self.mode}"')
        own = next((key for key in self.extra if key in SENT), None)
        if own is not None:
            raise ValueError(f"backend.extra.{own}: this field has a key of its own in the config, or is not yours to set")
        return self


CHAT_ONLY = ("strict", "token_ids", "limit_key", "omit", "extra")
TOKENS_ONLY = ("tokenizer", "renderer", "thinking")
SENT = {
    *("model", "messages", "tools", "temperature", "seed", "max_tokens", "max_completion_tokens", "return_token_ids"),
    *("n", "stream"),
}
"""What a chat request holds, or must not."""


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
    """GPUs of the trainer, on one machine."""
    engines: PositiveInt = 1
    """vLLM engines of one GPU each."""
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

Backend = Annotated[AnyBackend, Field(discriminator="kind")]


def refuse_what_cannot_be_honoured(backend: AnyBackend, value_of: Callable[[str], Any]) -> None:
    """`value_of` gives the value of a key such as `loss.kl`, or None where its section is not there."""
    for knob in backend.limits():
        value = value_of(knob.key)
        if value is not None and value not in knob.values:
            right = " or ".join("unset" if v is None else repr(v) for v in knob.values)
            raise ValueError(f"{knob.key} = {value!r}: the backend {backend.kind!r} {knob.why}; it must be {right}")
