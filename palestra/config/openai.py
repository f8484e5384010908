"""The section for models behind OpenAI-compatible servers, and what they cost."""

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import pydantic
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from palestra.config.backend_section import BackendSection, Model, Only
from palestra.config.section import Section


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
