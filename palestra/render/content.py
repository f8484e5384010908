"""What a message says, for renderers that take text only."""

from palestra.errors import ModelError
from palestra.message import Image, Message


def text_of(message: Message) -> str:
    if not isinstance(message.content, str) and any(isinstance(part, Image) for part in message.content):
        raise ModelError(
            f"a {message.role} message holds an image, and this renderer takes text only; describe the image in text"
        )
    return message.text
