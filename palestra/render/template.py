"""A model folder's Jinja chat template, run as the Hugging Face tools run it, in a sandbox.

Contents are shielded while the template runs: the characters that begin or end a marker are exchanged for stand-ins, so that
every marker in what comes out is the template's own, while trimming, escaping and the like act on the contents as usual.
"""

import datetime
import json
from collections.abc import Sequence

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from palestra.errors import ModelError
from palestra.message import JSON, Message, to_json
from palestra.render.content import text_of
from palestra.render.tokenizer import Piece, Tokenizer
from palestra.tool import Schema

_STAND_INS = "".join(map(chr, range(0xFDD0, 0xFDF0)))  # Unicode keeps these 32 free of any character


class Template:
    def __init__(self, tokenizer: Tokenizer, thinking: bool) -> None:
        if tokenizer.template is None:
            raise ModelError(f"{tokenizer.folder}: no chat template; add chat_template.jinja, or name the family of the model")
        edges = sorted({letter for marker in tokenizer.markers for letter in (marker[0], marker[-1])})
        if len(edges) > len(_STAND_INS):
            raise ModelError(
                f"{tokenizer.folder}: its added tokens are too varied to be told from text; use one made for chat models"
            )
        self.folder = tokenizer.folder
        self.source = tokenizer.template
        self._thinking = thinking
        self._tokenizer = tokenizer
        # Should contents hold a stand-in themselves, it is no character, and becomes U+FFFD.
        self._shield = str.maketrans(dict.fromkeys(_STAND_INS, "\ufffd") | dict(zip(edges, _STAND_INS, strict=False)))
        self._unshield = str.maketrans(dict(zip(_STAND_INS, edges, strict=False)))
        try:
            self._compiled = _environment().from_string(self.source)
        except jinja2.TemplateError as error:
            raise ModelError(f"{self.folder}: its chat template is no Jinja ({error}); download it again") from None

    def render(self, messages: Sequence[Message], tools: Sequence[Schema] = (), open_reply: bool = False) -> str:
        """The conversation as text in which the contents are shielded."""
        try:
            return self._compiled.render(
                messages=[self._shielded(_as_dict(message)) for message in messages],
                tools=[self._shielded(tool) for tool in tools] or None,
                add_generation_prompt=open_reply,
                enable_thinking=self._thinking,
                **self._tokenizer.names,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ModelError(
                f"{self.folder}: its chat template refuses this conversation ({error}); use another family"
            ) from None

    def encode(self, text: str) -> list[int]:
        """The tokens of rendered text: markers as markers, contents as they were."""
        return self._tokenizer.encode(map(self._bare, self._tokenizer.cut(text)))

    def bare(self, text: str) -> str:
        """Rendered text with the contents as they were."""
        return text.translate(self._unshield)

    def _bare(self, piece: Piece) -> Piece:
        return self.bare(piece) if isinstance(piece, str) else piece

    def _shielded(self, value: JSON) -> JSON:
        if isinstance(value, str):
            return value.translate(self._shield)
        if isinstance(value, dict):
            return {self._shielded(key): self._shielded(item) for key, item in value.items()}
        return [self._shielded(item) for item in value] if isinstance(value, list) else value


def _as_dict(message: Message) -> dict[str, JSON]:
    return to_json(message) | {"content": text_of(message)}


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json  # Jinja's own escapes HTML
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks replies for tools that train on text; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  # Jinja declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _to_json(
    value: JSON,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
