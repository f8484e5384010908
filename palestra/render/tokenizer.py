"""A model folder's tokenizer, with its markers (added tokens such as `<|im_end|>`) kept apart from what anyone may write.

A marker's id comes only from `Own` text, which a template vouches for. Whatever else is encoded cannot become a marker,
however it is spelled.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from palestra.errors import ModelError
from palestra.message import JSON


@dataclass(frozen=True, slots=True)
class Own:
    """A template's own text, in which markers count."""

    text: str


Piece = str | Own
"""A plain `str` is what somebody said, so forgetting to think about it is safe."""


@dataclass(frozen=True, slots=True)
class _Marker:
    id: int
    strips_left: bool
    strips_right: bool


class Tokenizer:
    """Made by `load`."""

    def __init__(
        self, folder: Path, data: dict[str, JSON], config: Mapping[str, JSON], model_type: str, template: str | None
    ) -> None:
        self.folder = folder
        self.model_type = model_type
        self.template = template
        self.names: dict[str, str] = {key: name for key in ("bos_token", "eos_token") if (name := _token_name(config.get(key)))}
        """What a chat template calls `bos_token` and `eos_token`."""
        self._full = _build(data)
        self._markers = {
            token["content"]: _Marker(id, token.get("lstrip", False), token.get("rstrip", False))
            for token in data["added_tokens"]
            if not _is_space(token["content"]) and (id := self._full.token_to_id(token["content"])) is not None
        }
        self._marker = _any_of(self._markers)
        self._plain = _build(_without_markers(data, self._markers))

    @property
    def markers(self) -> Set[str]:
        return self._markers.keys()

    def ids(self, *markers: str) -> frozenset[int]:
        """The ids of those of the markers that the tokenizer has."""
        return frozenset(self._markers[marker].id for marker in markers if marker in self._markers)

    def cut(self, text: str) -> list[Piece]:
        """A template's own text, cut into markers (`Own`) and what stands between them."""
        return _cut(text, self._marker)

    def encode(self, pieces: Iterable[Piece]) -> list[int]:
        """The tokens of the pieces. What stands between two markers is encoded as one, as a tokenizer does with a whole text."""
        tokens: list[int] = []
        run = ""
        strip = False
        parts = (part for piece in pieces for part in (self.cut(piece.text) if isinstance(piece, Own) else [piece]))
        for part in parts:
            if isinstance(part, str):
                run += part
                continue
            marker = self._markers[part.text]
            run = run.rstrip() if marker.strips_left else run
            tokens += self._encode_run(run.lstrip() if strip else run)
            tokens.append(marker.id)
            run, strip = "", marker.strips_right
        return tokens + self._encode_run(run.lstrip() if strip else run)

    def decode(self, tokens: Sequence[int]) -> str:
        """The tokens as text, markers included. Broken UTF-8 becomes U+FFFD; ids outside the vocabulary are left out."""
        text: str = self._full.decode(list(tokens), skip_special_tokens=False)
        return text

    def split(self, tokens: Sequence[int], names: Sequence[str]) -> list[Piece]:
        """The tokens as text, cut at the named marks (`Own`). A mark that this tokenizer has as a marker is found by its id
        alone; any other is found by its letters."""
        by_id = {self._markers[name].id: name for name in names if name in self._markers}
        by_letters = _any_of(name for name in names if name not in self._markers)
        pieces: list[Piece] = []
        start = 0
        for index, token in enumerate(tokens):
            if token in by_id:
                pieces += _cut(self.decode(tokens[start:index]), by_letters)
                pieces.append(Own(by_id[token]))
                start = index + 1
        return pieces + _cut(self.decode(tokens[start:]), by_letters)

    def agrees(self) -> bool:
        """Whether text with every marker in it is encoded here as the tokenizer itself would encode it."""
        text = "".join(f"{marker} of\ntext " for marker in self._markers)
        return bool(self.encode([Own(text)]) == self._full.encode(text, add_special_tokens=False).ids)

    def _encode_run(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(_well_formed(text), add_special_tokens=False).ids if text else []
        return ids


def load(folder: Path) -> Tokenizer:
    """Read `tokenizer.json` and, where they exist, `tokenizer_config.json`, `chat_template.jinja` and `config.json`."""
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{folder}: no tokenizer.json here; give the folder of a model in the Hugging Face format")
    data = _read_json(folder / "tokenizer.json")
    config = _read_json(folder / "tokenizer_config.json")
    model_type = str(_read_json(folder / "config.json").get("model_type", ""))
    template = _read_template(folder, config)
    kind = data["model"].get("type", "BPE") if isinstance(data.get("model"), dict) else None
    if kind != "BPE":
        raise ModelError(f"{folder}: tokenizer.json holds a {kind} tokenizer; only BPE tokenizers can be used")
    try:
        tokenizer = Tokenizer(folder, data, config, model_type, template)
    except Exception as error:  # the Rust library raises bare Exceptions
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"{folder}: tokenizer.json cannot be used ({reason}); download it again") from error
    if not tokenizer.agrees():
        raise ModelError(f"{folder}: markers cannot be told from text with this tokenizer.json; use one made for chat models")
    return tokenizer


def _read_json(path: Path) -> dict[str, JSON]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path.parent}: {path.name} cannot be read ({error}); download it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path.parent}: {path.name} holds no JSON object; download it again")
    return value


def _read_template(folder: Path, config: Mapping[str, JSON]) -> str | None:
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        template = config.get("chat_template")
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: chat_template.jinja cannot be read ({error}); download it again") from None
    if isinstance(template, list):  # older folders may name several templates
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _token_name(value: JSON) -> str | None:
    name = value.get("content") if isinstance(value, dict) else value
    return name if isinstance(name, str) else None


def _is_space(text: str) -> bool:
    """Some tokenizers add runs of spaces or newlines as tokens; they are text, and mark nothing."""
    return not text.strip(" \t\r\n▁")


def _build(data: dict[str, JSON]) -> tokenizers.Tokenizer:
    # A post-processor would add tokens of its own (Llama's adds <|begin_of_text|>), and truncation would lose some.
    return tokenizers.Tokenizer.from_str(json.dumps(data | {"post_processor": None, "truncation": None, "padding": None}))


def _without_markers(data: dict[str, JSON], markers: Mapping[str, object]) -> dict[str, JSON]:
    """The same tokenizer with no way to write a marker: neither as an added token, nor as a word, nor by a merge."""
    unknown = data["model"].get("unk_token")
    gone = {marker for marker in markers if marker != unknown}
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in data["model"]["merges"]]
    model = data["model"] | {
        "vocab": {word: id for word, id in data["model"]["vocab"].items() if word not in gone},
        "merges": [pair for pair in pairs if "".join(pair) not in markers and gone.isdisjoint(pair)],
    }
    added = [token for token in data["added_tokens"] if token["content"] not in markers]
    return data | {"model": model, "added_tokens": added, "pre_tokenizer": _inside_text(data.get("pre_tokenizer"))}


def _inside_text(step: JSON) -> JSON:
    """What is encoded stands between markers, so a pre-tokenizer must not take it for the beginning of a text."""
    if isinstance(step, dict) and step.get("prepend_scheme") == "first":
        return step | {"prepend_scheme": "never"}
    if isinstance(step, dict) and "pretokenizers" in step:
        return step | {"pretokenizers": [_inside_text(inner) for inner in step["pretokenizers"]]}
    return step


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _cut(text: str, marks: re.Pattern[str]) -> list[Piece]:
    pieces: list[Piece] = []
    start = 0
    for match in marks.finditer(text):
        pieces += [text[start : match.start()], Own(match[0])]
        start = match.end()
    return [*pieces, text[start:]]


def _well_formed(text: str) -> str:
    """The text with lone surrogates, which have no UTF-8, as U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
