"""Output that may be long or no text at all, as a model reads it: its beginning and its end, and how much there was."""

import codecs

from palestra.protocols import Output


def as_text(output: Output) -> str:
    """What a command wrote. What was left out, and bytes that are no text, are said in brackets."""
    if output.whole:
        text, clean = _decode(output.head + output.tail)
    else:
        head, clean_head = _decode(_without_cut_end(output.head))
        tail, clean_tail = _decode(output.tail.lstrip(_CONTINUATION) if len(output.tail) > 3 else output.tail)
        left_out = output.size - len(output.head) - len(output.tail)
        gap = f"[… {left_out:,} of {output.size:,} bytes left out …]"
        text, clean = f"{head.rstrip()}\n{gap}\n{tail.lstrip()}", clean_head and clean_tail
    return text if clean else f"{text.rstrip()}\n[bytes that are no UTF-8 are shown as \ufffd]"


def within(output: Output, keep: int) -> Output:
    """The same, with so many bytes kept."""
    kept = output.head + output.tail
    if len(kept) <= keep:
        return output
    return Output(kept[: keep // 2], kept[len(kept) - keep // 2 :], output.size)


def shortened(text: str, limit: int) -> str:
    """At most about so many characters of a text: its beginning and its end."""
    if len(text) <= limit:
        return text
    half = limit // 2
    gap = f"[… {len(text) - 2 * half:,} of {len(text):,} characters left out …]"
    return f"{text[:half].rstrip()}\n{gap}\n{text[-half:].lstrip()}"


_CONTINUATION = bytes(range(0x80, 0xC0))


def _without_cut_end(data: bytes) -> bytes:
    """Without the last character where only its first bytes were kept."""
    for back in range(1, min(4, len(data) + 1)):
        if data[-back] >= 0xC0:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            return data if decoder.decode(data[-back:]) else data[:-back]
    return data


def _decode(data: bytes) -> tuple[str, bool]:
    try:
        return data.decode("utf-8"), True
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace"), False
