"""Whole conversations as training sequences, for a supervised warm start.

They are laid out as in a rollout: prompt, reply, follow, reply, and so on.
"""

from collections.abc import Sequence

from palestra.errors import ModelError
from palestra.message import Message
from palestra.protocols import Renderer
from palestra.tool import Schema


def encode(renderer: Renderer, messages: Sequence[Message], tools: Sequence[Schema]) -> tuple[list[int], list[bool]]:
    """The tokens up to the last reply, and for each whether the assistant writes it (its stop token included)."""
    replies = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not replies:
        raise ModelError("a conversation without a reply of the assistant teaches nothing; leave it out")
    tokens = renderer.prompt(messages[: replies[0]], tools)
    mask = [False] * len(tokens)
    for index, following in zip(replies, [*replies[1:], None], strict=True):
        reply = renderer.reply(messages[index])
        between = renderer.follow("stop", messages[index + 1 : following]) if following is not None else []
        tokens += reply + between
        mask += [True] * len(reply) + [False] * len(between)
    return tokens, mask
