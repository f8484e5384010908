"""The fallback for any model with a chat template: the template itself says what to write.

It must be prefix-stable, which is tried at construction: what it wrote for a conversation stays, to the letter, when messages are
added. Calls are read as Hermes writes them when the template mentions `<tool_call>`, and as Llama 3 does when it does not.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from palestra.errors import ModelError
from palestra.message import Message, ToolCall, assistant, user
from palestra.render import hermes, llama3
from palestra.render.calls import refuse_faults
from palestra.render.template import Template
from palestra.render.thinking import MARKS
from palestra.render.tokenizer import Own, Tokenizer
from palestra.tool import Schema
from palestra.trajectory import FinishReason

_QUESTION = user("What is it?")
_ANSWER = assistant("It is this.")
_THOUGHT = replace(_ANSWER, thinking="Hm.")
_CALL = ToolCall("call_0000", "look", {"at": "it"})
_RESULT = Message("tool", "A thing.", call_id=_CALL.id, name=_CALL.name)

_PROBES: dict[str, list[Message]] = {
    "the user speaks again": [_QUESTION, _ANSWER, _QUESTION, _ANSWER, _QUESTION],
    "the assistant has thought": [_QUESTION, _THOUGHT, _QUESTION, _THOUGHT, _QUESTION],
    "a tool answers": [_QUESTION, assistant("", _CALL), _RESULT, _ANSWER, _QUESTION],
}


class Jinja:
    """A `Renderer`."""

    def __init__(self, tokenizer: Tokenizer, thinking: Literal["keep", "off"] = "off") -> None:
        self._tokenizer = tokenizer
        self._template = Template(tokenizer, thinking == "keep")
        self._knows_results = "tool" in self._template.source
        self._refuse_lost_contents()
        self._refuse_unstable()
        self._opening = self._template.render([_QUESTION], open_reply=True)
        self._opened = self._opening.rstrip().endswith("<think>")
        self._hermes = "<tool_call>" in self._template.source
        self._closing, stop = self._find_closing()
        self._behind = self._closing.index(stop) + len(stop)
        self._many_calls = self._knows_results and self._takes_two_calls()
        self.stop_ids = tokenizer.ids(stop, tokenizer.names.get("eos_token", stop))

    def prompt(self, messages: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        source = self._template.source
        if tools and ("tools" not in source or "<function=" in source):
            problem = "knows no tools" if "tools" not in source else "writes calls as <function=…>, which is not read here"
            raise ModelError(
                f"{self._template.folder}: its chat template {problem}; use family 'hermes' if the model knows ChatML"
            )
        return self._template.encode(self._template.render(messages, tools, open_reply=True))

    def follow(self, finish: FinishReason, messages: Sequence[Message]) -> list[int]:
        said = [_QUESTION, self._stand_in(messages)]
        before = self._template.render(said)
        after = self._template.render([*said, *messages], open_reply=True)
        if not after.startswith(before):
            raise self._unstable("other messages follow")
        start = 0 if finish == "length" else self._behind
        return self._template.encode(self._closing[start:] + after[len(before) :])

    def reply(self, message: Message) -> list[int]:
        refuse_faults(message)
        whole = self._template.render([_QUESTION, message])
        if not (whole.startswith(self._opening) and whole.endswith(self._closing)):
            raise self._unstable("a reply is written out")
        body = whole[len(self._opening) : -len(self._closing)]
        return self._template.encode(body + self._closing[: self._behind])

    def parse(self, tokens: Sequence[int]) -> Message:
        end = next((index for index, token in enumerate(tokens) if token in self.stop_ids), len(tokens))
        if self._hermes:
            return hermes.read_reply(self._tokenizer.split(tokens[:end], (*MARKS, *hermes.CALL_MARKS)), self._opened)
        return llama3.read_reply(self._tokenizer.split(tokens[:end], (*MARKS, llama3.TAG)), self._opened)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)

    def _find_closing(self) -> tuple[str, str]:
        """What the template puts behind a reply, and the marker in it, which the model therefore stops with."""
        closing = self._template.render([_QUESTION, _ANSWER]).rpartition(_ANSWER.text)[2]
        stop = next((piece.text for piece in self._tokenizer.cut(closing) if isinstance(piece, Own)), None)
        if stop is None:
            raise ModelError(f"{self._template.folder}: its chat template closes a reply with no marker; name the model's family")
        if self._knows_results and not self._template.render([_QUESTION, assistant("", _CALL)]).endswith(closing):
            raise ModelError(
                f"{self._template.folder}: its chat template closes a reply with calls otherwise; name the model's family"
            )
        return closing, stop

    def _takes_two_calls(self) -> bool:
        try:
            self._template.render([_QUESTION, assistant("", _CALL, _CALL)])
        except ModelError:
            return False
        return True

    def _stand_in(self, messages: Sequence[Message]) -> Message:
        """A reply that the messages could follow: some templates insist that results answer calls, or that there is only one."""
        results = [message for message in messages if message.role == "tool"]
        calls = [replace(_CALL, id=result.call_id or _CALL.id, name=result.name or _CALL.name) for result in results]
        return assistant("", *calls[: None if self._many_calls else 1]) if calls else _ANSWER

    def _refuse_lost_contents(self) -> None:
        odd = " ".join(sorted(self._tokenizer.markers)[:100]) + " ü"
        talks = [[user(odd)], [_QUESTION, assistant(odd), _QUESTION]]
        if self._knows_results:
            talks.append([_QUESTION, assistant("", _CALL), replace(_RESULT, content=odd)])
        for talk in talks:
            if odd not in self._template.bare(self._template.render(talk)):
                raise ModelError(
                    f"{self._template.folder}: its chat template does not print contents as they are; "
                    "name the model's family, or edit chat_template.jinja"
                )

    def _refuse_unstable(self) -> None:
        for name, messages in _PROBES.items():
            if not self._knows_results and _RESULT in messages:
                continue
            for end in range(2, len(messages) + 1):
                opens = messages[end - 1].role == "assistant" and messages[end - 1] != _THOUGHT  # thinking may be off
                if not self._template.render(messages[:end]).startswith(
                    self._template.render(messages[: end - 1], open_reply=opens)
                ):
                    raise self._unstable(name)

    def _unstable(self, when: str) -> ModelError:
        return ModelError(
            f"{self._template.folder}: its chat template is not prefix-stable, it changes earlier turns when {when}; "
            "name the model's family, or edit chat_template.jinja to print a turn alike wherever it stands"
        )
