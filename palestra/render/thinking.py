"""The part of a reply that a model thinks before it speaks: `<think>…</think>` at its beginning, and nowhere else."""

from collections.abc import Sequence

from palestra.render.tokenizer import Own, Piece

OPEN, CLOSE = Own("<think>"), Own("</think>")
MARKS = (OPEN.text, CLOSE.text)


def take_thinking(pieces: Sequence[Piece], opened: bool = False) -> tuple[str | None, list[Piece]]:
    """What was thought, and the rest of the reply. With `opened` the prompt itself began the thinking. Thinking that was cut
    off takes all that follows, so that a call which was only thought about is never made."""
    rest = list(pieces)
    if not opened:
        start = next((index for index, piece in enumerate(rest) if isinstance(piece, Own) or piece.strip()), len(rest))
        if start == len(rest) or rest[start] != OPEN:
            return None, rest
        rest = rest[start + 1 :]
    end = rest.index(CLOSE) if CLOSE in rest else len(rest)
    thought, rest = joined(rest[:end]).strip("\n"), rest[end + 1 :]
    if rest and isinstance(rest[0], str):
        rest[0] = rest[0].lstrip("\n")
    return thought or None, rest


def joined(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text if isinstance(piece, Own) else piece for piece in pieces)
