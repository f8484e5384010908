import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.lab import clock, workload
from palestra.lab.context import Context
from palestra.lab.engine import Engine
from palestra.lab.precedence import First
from palestra.lab.totals import Totals


def spec(kv_tokens: int = 10_000, units: int = 1, shares_prompts: bool = False, whole_chunks: bool = False) -> workload.Engine:
    """A step takes 1 s, 0.5 s more for each sequence that decodes and 1 s more for each that prefills, on one unit."""
    return workload.Engine(
        units=units,
        step_seconds=1.0,
        decode_seconds=0.5,
        prefill_rate=512.0,
        prefill_chunk=512,
        kv_tokens=kv_tokens,
        switch_keeps_kv=False,
        shares_prompts=shares_prompts,
        whole_chunks=whole_chunks,
    )


def play(
    script: Callable[[Engine], Awaitable[None]],
    first: First = "arrived",
    kv_tokens: int = 10_000,
    units: int = 1,
    piece: int | None = None,
    shares_prompts: bool = False,
    whole_chunks: bool = False,
) -> Totals:
    async def main() -> Totals:
        engine = Engine(spec(kv_tokens, units, shares_prompts, whole_chunks), units, first, piece)
        await script(engine)
        assert (engine.kv_used, engine.contexts) == (0, 0)
        return engine.totals()

    return clock.run(main())


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(("whole_chunks", "first", "second"), [(False, 1.5, 0.25), (True, 2, 1)])
def test_a_sequence_alone(whole_chunks: bool, first: float, second: float) -> None:
    prefill = (first + second) * 2.0

    async def script(engine: Engine) -> None:
        async with engine.context(0) as context:
            await context.call(768, 10)
            assert now() == pytest.approx(first * 2.0 + 10 * 1.5)
            await asyncio.sleep(100)
            await context.call(128, 2)  # only what is new
            assert now() == pytest.approx(prefill + 10 * 1.5 + 100 + 2 * 1.5)

    totals = play(script, whole_chunks=whole_chunks)
    assert (totals.prefilled, totals.prefilled_again, totals.decoded) == (896, 0, 12)
    assert totals.chunks == pytest.approx(first + second)
    assert totals.unit_seconds == pytest.approx(prefill + 18)
    assert totals.peak_contexts == 1


def test_two_sequences_slow_each_other() -> None:
    ends = []

    async def one(engine: Engine, order: int, start: float, output: int) -> None:
        await asyncio.sleep(start)
        async with engine.context(order) as context:
            await context.call(512, output)
            ends.append(now())

    async def script(engine: Engine) -> None:
        await asyncio.gather(one(engine, 0, 0.0, 10), one(engine, 1, 2.0 + 6.0, 10))

    play(script)
    # The first prefills until 2 and has four tokens at 8; one takes 2.5 s beside the other's prefill, the last five 2 s each.
    assert ends == pytest.approx([8 + 2.5 + 5 * 2.0, 20.5 + 5 * 1.5])


def test_more_units_share_the_load() -> None:
    async def script(engine: Engine) -> None:
        async with engine.context(0) as context:
            await context.call(512, 10)
        assert now() == pytest.approx(1 + 1 / 4 + 10 * (1 + 0.5 / 4))

    assert play(script, units=4).unit_seconds == pytest.approx(4 * 12.5)


async def waiting(engine: Engine, order: int, tokens: int, seconds: float) -> None:
    """A context that has a first call, waits for a tool, and calls again."""
    async with engine.context(order) as context:
        await context.call(tokens - 10, 10)
        await asyncio.sleep(seconds)
        await context.call(10, 10)


async def newcomer(engine: Engine, order: int, tokens: int, start: float, starts: list[float]) -> None:
    await asyncio.sleep(start)
    async with engine.context(order) as context:
        await context.call(tokens - 10, 10)
        starts.append(now())


async def busy(engine: Engine, tokens: int) -> None:
    """Somebody is at work meanwhile, and will make room."""
    async with engine.context(99) as context:
        await context.call(10, tokens)


def test_without_room_the_least_recently_used_is_evicted() -> None:
    done: list[float] = []

    async def script(engine: Engine) -> None:
        await asyncio.gather(waiting(engine, 0, 4000, 1000), waiting(engine, 1, 4500, 2000), newcomer(engine, 2, 3000, 500, done))

    totals = play(script)
    assert done == pytest.approx([500 + 2990 / 512 * 2.0 + 10 * 1.5])
    assert totals.prefilled_again == 4000  # the first, which was used before the second
    assert totals.prefilled == 3990 + 4490 + 2990 + 4010 + 10


def test_pinned_a_newcomer_waits_instead() -> None:
    done: list[float] = []

    async def script(engine: Engine) -> None:
        await asyncio.gather(
            busy(engine, 900),
            waiting(engine, 0, 4000, 1000),
            waiting(engine, 1, 4500, 1000),
            newcomer(engine, 2, 3000, 500, done),
        )

    totals = play(script, first="shortest")
    assert totals.prefilled_again == 0
    assert done[0] > 1000


async def grow(engine: Engine, order: int, first: int, tool: float, more: int, ends: dict[int, float]) -> None:
    async with engine.context(order) as context:
        await context.call(first - 10, 10)
        await asyncio.sleep(tool)
        await context.call(more, 10)
        ends[order] = now()


def test_pinned_who_grows_takes_from_the_shortest() -> None:
    ends: dict[int, float] = {}

    async def script(engine: Engine) -> None:
        await asyncio.gather(
            busy(engine, 500),
            grow(engine, 0, 3000, 100, 2000, ends),
            grow(engine, 1, 2500, 300, 100, ends),
            grow(engine, 2, 2900, 300, 100, ends),
        )

    assert play(script, first="shortest").prefilled_again == 2500
    assert ends[0] < ends[2] < ends[1]  # the shortest was prefilled again


def test_pinned_those_that_started_first_are_spared() -> None:
    ends: dict[int, float] = {}

    async def script(engine: Engine) -> None:
        async with engine.context(0) as context:  # leaves with 4500 tokens, so KV holds two such contexts to their end
            await context.call(4490, 10)
        await asyncio.gather(
            busy(engine, 500),
            grow(engine, 1, 2500, 300, 100, ends),
            grow(engine, 2, 3000, 100, 2000, ends),
            grow(engine, 3, 2900, 300, 100, ends),
        )

    assert play(script, first="shortest").prefilled_again == 2900
    assert ends[2] < ends[1] < ends[3]


def test_oldest_first_who_grows_takes_from_who_started_last_but_not_from_the_young() -> None:
    ends: dict[int, float] = {}

    async def script(engine: Engine) -> None:
        async with engine.context(0) as context:  # leaves with 8000 tokens, so one of 1900 is young
            await context.call(7990, 10)
        await asyncio.gather(
            busy(engine, 500),
            grow(engine, 1, 2000, 100, 2000, ends),
            grow(engine, 2, 2600, 300, 100, ends),
            grow(engine, 3, 2400, 300, 100, ends),
            grow(engine, 4, 1900, 300, 100, ends),
        )

    assert play(script, first="oldest").prefilled_again == 2400
    assert ends[1] < ends[2]
    assert ends[4] < ends[3]


@pytest.mark.parametrize("first", ["shortest", "oldest"])
def test_only_with_the_oldest_first_newcomers_have_a_pace_once_units_train(first: First) -> None:
    """Fifty short contexts come at once to a large KV that is nearly full."""
    starts: list[float] = []
    ends: dict[int, float] = {}

    async def script(engine: Engine) -> None:
        async with engine.context(0) as context:
            await context.call(9_000, 1_000)
        engine.resize(1, 100_000)
        began = now()
        await asyncio.gather(
            *(grow(engine, order, 10_500, 5_000, 10, ends) for order in range(1, 10)),
            *(newcomer(engine, order, 100, 300, starts) for order in range(10, 60)),
        )
        assert min(starts) > began + 300

    play(script, first, kv_tokens=100_000)
    assert (max(starts) - min(starts) > 500) == (first == "oldest")


@pytest.mark.parametrize(("hurried", "order"), [(False, [1, 2]), (True, [2, 1])])
def test_when_nothing_comes_after_them_the_shortest_goes_first(hurried: bool, order: list[int]) -> None:
    served: list[int] = []

    async def come(engine: Engine, order: int, tokens: int) -> None:
        async with engine.context(order) as context:
            await context.call(tokens - 10, 10)
            served.append(order)

    async def script(engine: Engine) -> None:
        tasks = [asyncio.create_task(each) for each in (busy(engine, 4000), come(engine, 1, 4000), come(engine, 2, 3500))]
        await asyncio.sleep(10)
        if hurried:
            engine.hurry()
        await asyncio.gather(*tasks)

    play(script, "oldest", kv_tokens=5000)
    assert served == order


@pytest.mark.parametrize(("first", "order"), [("arrived", [2, 0, 1]), ("shortest", [1, 2, 0]), ("oldest", [0, 1, 2])])
def test_who_goes_first_of_those_without_kv(first: First, order: list[int]) -> None:
    served: list[int] = []

    async def come(engine: Engine, order: int, tokens: int, start: float) -> None:
        await asyncio.sleep(start)
        async with engine.context(order) as context:
            await context.call(tokens - 10, 10)
            served.append(order)

    async def script(engine: Engine) -> None:
        await asyncio.gather(busy(engine, 4000), come(engine, 2, 4000, 1), come(engine, 0, 4500, 2), come(engine, 1, 3500, 3))

    play(script, first, kv_tokens=5000)
    assert served == order


@pytest.mark.parametrize("first", ["shortest", "oldest"])
def test_pinned_who_has_kv_goes_before_who_has_none(first: First) -> None:
    ends: dict[int, float] = {}
    done: list[float] = []

    async def script(engine: Engine) -> None:
        await asyncio.gather(
            busy(engine, 5500),
            grow(engine, 1, 4000, 200, 20, ends),
            newcomer(engine, 0, 3000, 100, done),
        )

    play(script, first)
    assert ends[1] < done[0] < 300  # it makes room for the newcomer by leaving


def test_with_nothing_at_work_even_pinned_contexts_give_way() -> None:
    done: list[float] = []

    async def script(engine: Engine) -> None:
        await asyncio.gather(waiting(engine, 0, 8000, 1e6), newcomer(engine, 1, 3000, 500, done))

    assert play(script, first="shortest").prefilled_again == 8000
    assert done[0] < 1000


def test_calls_without_room_queue_first_in_first_out() -> None:
    done: list[int] = []

    async def one(engine: Engine, order: int) -> None:
        async with engine.context(order) as context:
            await context.call(5990, 10)
            done.append(order)

    async def script(engine: Engine) -> None:
        await asyncio.gather(*(one(engine, order) for order in (3, 1, 2)))

    assert play(script).peak_contexts == 1
    assert done == [3, 1, 2]


async def write(engine: Engine, order: int, output: int, ends: dict[int, float]) -> None:
    async with engine.context(order) as context:
        await context.call(512, output)
        ends[order] = now()


@pytest.mark.parametrize(("piece", "at_once"), [(None, 2), (4000, 2), (1000, 3)])
def test_replies_in_pieces_leave_room_for_others(piece: int | None, at_once: int) -> None:
    ends: dict[int, float] = {}

    async def script(engine: Engine) -> None:
        await asyncio.gather(*(write(engine, order, 4000, ends) for order in range(3)))

    totals = play(script, first="oldest", piece=piece)
    assert totals.peak_contexts == at_once
    assert totals.decoded == 3 * 4000
    assert ends[0] < ends[2]


def test_a_piece_without_room_waits_for_it_and_keeps_what_is_there() -> None:
    ends: dict[int, float] = {}

    async def script(engine: Engine) -> None:
        await asyncio.gather(write(engine, 0, 1500, ends), write(engine, 1, 3000, ends))

    totals = play(script, first="oldest", kv_tokens=4000, piece=500)
    together = 3.0 + 1000 * 2.0  # then there is room for one more piece only
    assert ends == pytest.approx({0: together + 500 * 1.5, 1: together + 500 * 1.5 + 2000 * 1.5})
    assert totals.prefilled_again == 0


def test_a_call_that_can_never_fit_is_refused() -> None:
    async def script(engine: Engine) -> None:
        async with engine.context(0) as context:
            await context.call(9000, 2000)

    with pytest.raises(ValueError, match="does not fit"):
        play(script)


def test_who_is_cancelled_makes_room() -> None:
    done: list[float] = []

    async def script(engine: Engine) -> None:
        async def too_long(order: int) -> None:
            async with engine.context(order) as context:
                await context.call(9000, 1000)

        at_work, queued = asyncio.create_task(too_long(0)), asyncio.create_task(too_long(1))
        last = asyncio.create_task(newcomer(engine, 2, 3000, 10.0, done))
        await asyncio.sleep(200)
        queued.cancel()
        at_work.cancel()
        await last
        assert at_work.cancelled()
        assert queued.cancelled()

    totals = play(script)
    assert done == pytest.approx([200 + 2990 / 512 * 2.0 + 10 * 1.5])
    assert totals.decoded == 10 + int((200 - 9000 / 512 * 2.0) / 1.5)  # what was written counts


def test_a_lost_unit_takes_its_share_and_calls_go_on_after_it() -> None:
    async def script(engine: Engine) -> None:
        async def one(order: int, tokens: int) -> None:
            async with engine.context(order) as context:
                await context.call(512, tokens)

        calls = [asyncio.create_task(one(order, 100)) for order in range(2)]
        await asyncio.sleep(1 + 2 / 2 + 30 * (1 + 2 * 0.5 / 2))
        engine.resize(1, 10_000)  # one of the two was there
        await asyncio.gather(*calls)
        # The hit one prefills 542 tokens beside the other, which decodes; then both decode, and the hit one is as far behind.
        behind = 542 / 512
        assert now() == pytest.approx(47 + behind * (1 + 0.5 + 1) + (70 - behind) * 2.0 + behind * 1.5)

    totals = play(script, units=2)
    assert totals.decoded == 200
    assert totals.prefilled_again == 542


def test_a_prefill_that_is_given_up_was_for_nothing() -> None:
    async def script(engine: Engine) -> None:
        async with engine.context(0) as context:
            asyncio.get_running_loop().call_at(3 * 2.0, engine.resize, 0, 0)
            asyncio.get_running_loop().call_at(10, engine.resize, 1, 10_000)
            await context.call(2560, 10)
            assert now() == pytest.approx(10 + 5 * 2.0 + 10 * 1.5)

    totals = play(script)
    assert (totals.prefilled, totals.prefilled_again) == (2560 + 3 * 512, 3 * 512)


def test_a_pause_only_takes_time() -> None:
    async def script(engine: Engine) -> None:
        async with engine.context(0) as context:
            loop = asyncio.get_running_loop()
            loop.call_at(5.0, engine.pause)
            loop.call_at(12.0, engine.resume)
            await context.call(512, 10)
            assert now() == pytest.approx(2 + 15 + 7)

    assert play(script).unit_seconds == pytest.approx(17)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    first=st.sampled_from(get_args(First)),
    contexts=st.integers(1, 25),
    kv=st.sampled_from([4000, 5000, 9000]),
    piece=st.sampled_from([None, 1, 64, 250]),
    prompt=st.sampled_from([None, 0, 1, 2, 900]),
    whole_chunks=st.booleans(),
)
def test_all_are_served_and_kv_is_never_exceeded(
    seed: int, first: First, contexts: int, kv: int, piece: int | None, prompt: int | None, whole_chunks: bool
) -> None:
    """With prompts of this length that three contexts each share, or with none."""
    draw = random.Random(seed)
    decoded = 0

    async def one(engine: Engine, order: int) -> None:
        nonlocal decoded
        await asyncio.sleep(draw.choice([0, 0, 50, 200]))
        async with engine.context(order, order // 3) as context:
            new = prompt
            while context.length < 3000:
                output = draw.randint(0, 300)
                await call(engine, context, draw.randint(0, 600) if new is None else new, output)
                new = None
                decoded += output
                await asyncio.sleep(draw.choice([0, 1, 10, 300]))
                check(engine)

    async def call(engine: Engine, context: Context, new: int, output: int) -> None:
        await context.call(new, output)
        check(engine)

    def check(engine: Engine) -> None:
        prompts = {context.prompt for context in engine._open if context.prompt is not None}
        held = sum(context.held for context in engine._open) + sum(prompt.tokens for prompt in prompts if prompt.holders)
        assert 0 <= engine.kv_used == held <= engine.kv_tokens

    async def script(engine: Engine) -> None:
        tasks = [asyncio.create_task(one(engine, order)) for order in range(contexts)]
        for at, units in ((100, 2), (400, 3), (500, 0), (600, 1), (700, 3)):
            asyncio.get_running_loop().call_at(at, engine.resize, units, units * kv)
        await asyncio.gather(*tasks)

    totals = play(script, first, kv, units=3, piece=piece, shares_prompts=prompt is not None, whole_chunks=whole_chunks)
    assert totals.decoded == decoded
    if not whole_chunks:
        assert totals.chunks * 512 == pytest.approx(totals.prefilled, abs=contexts * 20)


def test_a_shared_prompt_is_prefilled_and_held_once() -> None:
    async def attempt(engine: Engine, start: float, kin: int, prefilled: int, used: int) -> None:
        await asyncio.sleep(start)
        async with engine.context(int(start), kin) as context:
            await context.call(2000, 10)
            assert now() == pytest.approx(start + prefilled / 512 * 2.0 + 10 * 1.5)
            assert engine.kv_used == used
            await asyncio.sleep(1000)

    async def script(engine: Engine) -> None:
        await asyncio.gather(
            attempt(engine, 0, 7, 2000, 1999 + 11),
            attempt(engine, 100, 7, 1, 1999 + 2 * 11),  # its prompt's last token
            attempt(engine, 200, 8, 2000, 2 * 1999 + 3 * 11),
            attempt(engine, 1090, 7, 1, 2 * 1999 + 3 * 11),  # the first has left, the second has not
            attempt(engine, 3000, 7, 2000, 1999 + 11),  # nobody had it any more
        )

    assert play(script, shares_prompts=True).prefilled == 3 * 2000 + 2


def test_whoever_loses_its_kv_finds_the_shared_prompt_there() -> None:
    async def script(engine: Engine) -> None:
        async def attempt(order: int, seconds: float) -> None:
            async with engine.context(order, 7) as context:
                await context.call(2000, 1000)
                await asyncio.sleep(seconds)
                await context.call(10, 10)

        async def other() -> None:
            await asyncio.sleep(10_000)
            async with engine.context(9, 9) as context:
                await context.call(4500, 100)

        # 1999 + 2 * 1001 tokens are held: the other one needs 4600, and only the first has to go for it.
        await asyncio.gather(attempt(0, 20_000), attempt(1, 25_000), other())

    totals = play(script, kv_tokens=8000, shares_prompts=True)
    assert totals.prefilled_again == 1001


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), first=st.sampled_from(get_args(First)), piece=st.sampled_from([None, 50]))
def test_cancelling_leaves_nothing_behind(seed: int, first: First, piece: int | None) -> None:
    draw = random.Random(seed)

    async def one(engine: Engine, order: int) -> None:
        async with engine.context(order) as context:
            while context.length < 3000:
                await context.call(draw.randint(0, 600), draw.randint(0, 300))
                await asyncio.sleep(draw.choice([0, 5, 50]))

    async def script(engine: Engine) -> None:
        tasks = [asyncio.create_task(one(engine, order)) for order in range(12)]
        for task in tasks:
            if draw.random() < 0.5:
                asyncio.get_running_loop().call_at(draw.uniform(0, 500), task.cancel)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError)

    play(script, first, kv_tokens=4000, piece=piece)
