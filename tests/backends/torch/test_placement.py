"""Room for keys and values: who gets it, a piece of a reply at a time, and who gives way."""

import random

import torch

from palestra.backends.torch.cache import Cache, Shape
from palestra.backends.torch.placement import PIECE, Placement, Request, Strand
from palestra.protocols import Sampling


def placement(kv_tokens: int) -> Placement:
    return Placement(Cache(Shape(layers=1, key_heads=1, size=2, dtype=torch.float32, device=torch.device("cpu"))), kv_tokens)


def strand(prompt: int, max_tokens: int) -> Strand:
    """With a prompt that it shares with nobody."""
    tokens = [random.Random(prompt).randrange(1000) for _ in range(prompt)]
    return Strand(random.Random(0), request=Request(tokens, Sampling(1.0, max_tokens), lambda _: None))


def write(strands: list[Strand], count: int) -> None:
    """As the sampler does: each draws tokens, and computes those before them."""
    for each in strands:
        assert each.request is not None
        each.request.written.extend([7] * count)
        each.request.tokens.extend([7] * count)
        each.held = each.request.tokens[:-1]


def test_replies_with_a_far_limit_run_side_by_side() -> None:
    place = placement(3000)
    strands = [strand(100 + i, max_tokens=2048) for i in range(4)]  # at their full length one would fill it
    for each in strands:
        place.add(each)
    assert place.placed(0) == strands


def test_who_started_first_takes_room_from_the_latest() -> None:
    place = placement(3000)
    strands = [strand(100 + i, max_tokens=2048) for i in range(4)]
    for each in strands:
        place.add(each)
    write(place.placed(0), PIECE)
    assert place.placed(0) == strands[:1]  # the second waits, and keeps what it has
    assert [each.path is not None for each in strands] == [True, True, False, False]
    write(strands[:1], PIECE)
    assert place.placed(0) == strands[:1]


def test_who_was_sent_back_comes_in_again_with_all_it_has_written() -> None:
    place = placement(2500)
    first, second = strand(100, max_tokens=2048), strand(101, max_tokens=2048)
    place.add(first)
    place.add(second)
    write(place.placed(0), 2 * PIECE)
    assert place.placed(0) == [first]
    assert second.path is None
    place.remove(first, 0)
    assert place.placed(0) == [second]
    assert second.request is not None
    assert second.held == second.request.tokens[: len(second.held)]
    assert second.request.promised == 3 * PIECE


def test_one_that_waits_for_a_tool_gives_way_before_one_at_work() -> None:
    place = placement(3000)
    working, waiting, late = (strand(100 + i, max_tokens=2048) for i in range(3))
    for each in (working, waiting, late):
        place.add(each)
    write(place.placed(0), 2 * PIECE)
    waiting.request = None
    assert working in place.placed(0)
    assert waiting.path is None
