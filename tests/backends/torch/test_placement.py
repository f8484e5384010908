"""Room for keys and values: who gets it, a piece of a reply at a time, and who gives way."""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.backends.torch.cache import Cache, Shape, length
from palestra.backends.torch.placement import REPLY_PIECE, Placement, Request, Strand
from palestra.protocols import Sampling

SHAPE = Shape(layers=1, key_heads=1, size=2, dtype=torch.float32, device=torch.device("cpu"))


def placement(kv_tokens: int) -> Placement:
    return Placement(Cache(SHAPE), kv_tokens)


def strand(prompt: int, max_tokens: int) -> Strand:
    """With a prompt that it shares with nobody."""
    chance = random.Random(prompt)
    tokens = [chance.randrange(1000) for _ in range(prompt)]
    return Strand(random.Random(0), request=Request(tokens, Sampling(1.0, max_tokens), lambda _: None))


def write_piece(place: Placement) -> list[Strand]:
    """As the sampler does: those that can go on draw tokens, and compute those before them."""
    placed = place.placed(0)
    for each in placed:
        assert each.request is not None
        each.request.written.extend([7] * REPLY_PIECE)
        each.request.tokens.extend([7] * REPLY_PIECE)
        each.held = each.request.tokens[:-1]
    return placed


def add(place: Placement, count: int) -> list[Strand]:
    """With replies that end by themselves long before their limit."""
    strands = [strand(100 + i, max_tokens=2048) for i in range(count)]
    for each in strands:
        place.add(each)
    return strands


def resident(strands: list[Strand]) -> list[bool]:
    return [each.path is not None for each in strands]


def test_replies_with_a_far_limit_run_side_by_side() -> None:
    place = placement(3000)
    strands = add(place, 4)
    assert write_piece(place) == strands  # at their full length one would fill it
    assert write_piece(place) == strands  # in the rows of 512 tokens that they have


def test_who_started_first_takes_room_from_the_latest() -> None:
    place = placement(3000)
    strands = add(place, 4)
    for _ in range(2):
        write_piece(place)
    assert write_piece(place) == strands[:1]
    assert resident(strands) == [True, True, False, False]  # the second waits, and keeps what it has
    assert write_piece(place) == strands[:1]


def test_who_was_sent_back_comes_in_again_with_all_it_has_written() -> None:
    place = placement(2500)
    first, second = add(place, 2)
    for _ in range(2):
        write_piece(place)
    assert write_piece(place) == [first]
    assert second.path is None
    assert second.request is not None
    place.remove(first, 0)
    assert place.placed(0) == [second]
    assert len(second.request.tokens) == 101 + 2 * REPLY_PIECE
    assert second.request.promised == 3 * REPLY_PIECE


def test_the_latest_gives_way_first_and_then_who_waits_for_a_tool() -> None:
    place = placement(2500)
    waiting, working, late = add(place, 3)
    for _ in range(2):
        write_piece(place)
    waiting.request = None
    assert place.placed(0) == [working]
    assert resident([waiting, working, late]) == [False, True, False]


def test_nobody_loses_anything_for_one_that_has_to_wait_all_the_same() -> None:
    place = placement(3500)
    first, second, late = add(place, 3)
    for _ in range(2):
        write_piece(place)
    late.request = None
    assert place.placed(0) == [first]  # in a row of 2048 tokens; a second one does not fit, whoever leaves
    assert resident([first, second, late]) == [True, True, True]


def test_what_a_tool_said_takes_no_room_before_it_is_given() -> None:
    place = placement(3300)
    first, second = add(place, 2)
    for _ in range(2):
        write_piece(place)
    second.request = Request([*second.held, *range(900)], Sampling(1.0, 2048), lambda _: None)
    for _ in range(3):
        assert write_piece(place) == [first]
        assert resident([first, second]) == [True, True]


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), kv_tokens=st.sampled_from([2500, 4000, 9000]), sessions=st.integers(1, 12))
def test_somebody_always_goes_on_and_room_is_never_exceeded(seed: int, kv_tokens: int, sessions: int) -> None:
    chance = random.Random(seed)
    cache = Cache(SHAPE)
    place = Placement(cache, kv_tokens)
    beginning = [chance.randrange(1000) for _ in range(200)]
    open_strands = {}
    for number in range(sessions):
        tokens = beginning[: chance.choice([0, 200])] + [chance.randrange(1000) for _ in range(chance.randrange(1, 300))]
        each = Strand(random.Random(0), request=Request(tokens, Sampling(1.0, chance.choice([1, 300, 900])), lambda _: None))
        open_strands[number] = each
        place.add(each)
    version = 0
    while open_strands:
        placed = place.placed(version)
        assert bool(placed) == bool(place.running())
        holders = [each for each in open_strands.values() if each.path is not None]
        assert place.committed() <= kv_tokens or len(holders) == 1
        for each in placed:
            assert each.path is not None
            _go_on(each, cache, chance)
        version += chance.random() < 0.1
        for number, each in list(open_strands.items()):
            if each.request is None and chance.random() < 0.5:  # its tool has returned
                if len(each.held) > 1000 or chance.random() < 0.3:
                    place.remove(each, version)
                    del open_strands[number]
                else:
                    told = [chance.randrange(1000) for _ in range(chance.randrange(1, 200))]
                    each.request = Request([*each.held, *told], Sampling(1.0, chance.choice([1, 300, 900])), lambda _: None)
                    place.add(each)


def _go_on(strand: Strand, cache: Cache, chance: random.Random) -> None:
    """Compute all that is asked for, and write some tokens of what was promised; perhaps they end the reply."""
    request, path = strand.request, strand.path
    assert request is not None
    assert path is not None
    count = chance.randint(1, request.promised - len(request.written))
    for tokens in (request.written, request.tokens):
        tokens.extend([7] * count)
    strand.held = request.tokens[:-1]
    strand.tail = cache.reserve(strand.tail, len(strand.held) - length(path))
    if len(request.written) == request.sampling.max_tokens or chance.random() < 0.1:
        strand.request = None
