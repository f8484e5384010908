"""The sampler: exact logprobs with everything shared and kept, seeds that do not see the schedule, and a cache that may go."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from palestra.backends.torch.draw import draw
from palestra.errors import InfrastructureError, ModelError
from palestra.protocols import Sampling
from palestra.trajectory import Completion, Sample, Segment

from .conftest import VOCABULARY, random_tokens

Engine = Callable[..., Any]


async def converse(sampler: Any, seed: int, prompt: list[int], turns: int, sampling: Sampling, pause: bool = False) -> Segment:
    """Several turns on one session, with something read between them."""
    chance = random.Random(seed)
    segment = Segment()
    segment.read(prompt)
    async with sampler.session(seed, 100) as session:
        for _ in range(turns):
            segment.wrote(await session.sample(segment.tokens, sampling))
            segment.read(random_tokens(chance, chance.randrange(1, 40)))
            if pause and chance.random() < 0.5:
                await asyncio.sleep(0.01)
    return segment


def as_sample(segment: Segment) -> Sample:
    return Sample(segment.tokens, segment.mask, segment.logprobs, segment.versions, 0.0)


def largest_gap(segments: list[Segment], logprobs: list[list[float]]) -> float:
    return max(
        abs(seen - computed)
        for segment, values in zip(segments, logprobs, strict=True)
        for mask, seen, computed in zip(segment.mask, segment.logprobs, values, strict=True)
        if mask
    )


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
async def test_logprobs_are_the_trainers_over_many_turns(engine: Engine, kind: str) -> None:
    chance = random.Random(1)
    system = random_tokens(chance, 50)
    prompts = [system + random_tokens(chance, 30) for _ in range(3)]
    async with engine(kind, temperature=0.7) as (sampler, trainer):
        work = [converse(sampler, i, prompts[i % 3], 4, Sampling(0.7, 25, frozenset({2})), pause=True) for i in range(12)]
        segments = await asyncio.gather(*work)
        logprobs = await trainer.logprobs([as_sample(segment) for segment in segments], 0.7)
    assert largest_gap(segments, logprobs) < 1e-4
    assert min(min(s.logprobs) for s in segments) < -1  # and they are not all the same


async def test_a_long_session_moves_to_larger_shelves(engine: Engine) -> None:
    async with engine() as (sampler, trainer):
        segment = await converse(sampler, 0, random_tokens(random.Random(0), 40), 30, Sampling(1.0, 30))
        assert len(segment) > 1000
        assert largest_gap([segment], await trainer.logprobs([as_sample(segment)], 1.0)) < 1e-4


async def test_a_shared_prompt_is_computed_once(engine: Engine) -> None:
    prompt = random_tokens(random.Random(0), 200)
    async with engine() as (sampler, _):
        await asyncio.gather(*(converse(sampler, i, prompt, 1, Sampling(1.0, 4)) for i in range(8)))
        assert sampler.prefilled_tokens < 210


async def test_different_prompts_share_their_beginning(engine: Engine) -> None:
    chance = random.Random(0)
    system = random_tokens(chance, 160)
    prompts = [system + random_tokens(chance, 240) for _ in range(4)]
    async with engine() as (sampler, _):
        await asyncio.gather(*(converse(sampler, i, prompts[i % 4], 1, Sampling(1.0, 4)) for i in range(16)))
        assert sampler.prefilled_tokens < 160 + 4 * 240 + 4 * 16 + 16


async def test_a_seed_gives_the_same_reply_alone_and_in_company(engine: Engine) -> None:
    prompt = random_tokens(random.Random(0), 30)
    async with engine() as (sampler, _):
        alone = await converse(sampler, 7, prompt, 3, Sampling(1.0, 12))
        different = await converse(sampler, 8, prompt, 3, Sampling(1.0, 12))
        others = [
            converse(sampler, i, random_tokens(random.Random(i), 25), 3, Sampling(1.0, 15), pause=True) for i in range(20, 26)
        ]
        together, *_ = await asyncio.gather(converse(sampler, 7, prompt, 3, Sampling(1.0, 12)), *others)
    assert alone.tokens == together.tokens
    assert alone.tokens != different.tokens


async def test_a_cache_that_is_too_small_for_all_changes_nothing_but_the_work(engine: Engine) -> None:
    chance = random.Random(3)
    prompts = [random_tokens(chance, 60) for _ in range(6)]

    async def run(kv_tokens: int) -> tuple[list[Segment], int]:
        async with engine(kv_tokens=kv_tokens) as (sampler, _):
            work = [converse(sampler, i, prompt, 3, Sampling(1.0, 10), pause=True) for i, prompt in enumerate(prompts)]
            return list(await asyncio.gather(*work)), sampler.prefilled_tokens

    roomy, little_work = await run(100_000)
    tight, more_work = await run(900)
    assert [s.tokens for s in roomy] == [s.tokens for s in tight]
    assert more_work >= little_work  # who finds no room waits; only those under way evict each other


async def test_a_reply_sent_back_in_the_middle_goes_on_where_it_was(engine: Engine) -> None:
    chance = random.Random(4)
    prompts = [random_tokens(chance, 60) for _ in range(3)]

    async def run(kv_tokens: int) -> tuple[list[Segment], int, float]:
        async with engine(kv_tokens=kv_tokens) as (sampler, trainer):
            work = [converse(sampler, i, prompt, 1, Sampling(1.0, 700)) for i, prompt in enumerate(prompts)]
            segments = list(await asyncio.gather(*work))
            gap = largest_gap(segments, await trainer.logprobs([as_sample(s) for s in segments], 1.0))
            return segments, sampler.prefilled_tokens, gap

    roomy, little_work, _ = await run(100_000)
    tight, more_work, gap = await run(2600)  # all three begin, and only one has room for a long reply
    assert [s.tokens for s in roomy] == [s.tokens for s in tight]
    assert more_work > little_work + 256
    assert gap < 1e-4


async def test_a_session_that_waits_for_a_tool_keeps_its_cache_while_newcomers_wait_for_room(engine: Engine) -> None:
    chance = random.Random(5)
    first, second, third = (random_tokens(chance, 300) for _ in range(3))
    async with engine(kv_tokens=1000) as (sampler, _), sampler.session(0, 100) as waiting:
        segment = Segment()
        segment.read(first)
        segment.wrote(await waiting.sample(segment.tokens, Sampling(1.0, 4)))
        segment.read(random_tokens(chance, 5))
        busy = asyncio.create_task(converse(sampler, 1, second, 1, Sampling(1.0, 100)))
        await asyncio.sleep(0)
        newcomer = asyncio.create_task(converse(sampler, 2, third, 1, Sampling(1.0, 4)))
        await asyncio.gather(busy, newcomer)
        before = sampler.prefilled_tokens
        await waiting.sample(segment.tokens, Sampling(1.0, 4))
        assert sampler.prefilled_tokens - before < 20  # only what the tool said


async def test_sessions_that_all_wait_give_way_to_a_newcomer(engine: Engine) -> None:
    """As when each of them waits for a sub-agent that needs the sampler itself."""
    chance = random.Random(6)
    async with engine(kv_tokens=1000) as (sampler, _), sampler.session(0, 100) as one, sampler.session(1, 100) as two:
        for session in (one, two):
            await session.sample(random_tokens(chance, 300), Sampling(1.0, 4))
        await asyncio.wait_for(converse(sampler, 2, random_tokens(chance, 300), 1, Sampling(1.0, 4)), 60)


async def test_a_trunk_in_use_is_not_evicted_to_make_room_for_its_user(engine: Engine) -> None:
    chance = random.Random(0)
    first = random_tokens(chance, 400)
    async with engine(kv_tokens=800) as (sampler, trainer):
        await converse(sampler, 0, first, 1, Sampling(1.0, 4))
        longer = first + random_tokens(chance, 200)
        segments = await asyncio.gather(*(converse(sampler, i, longer, 1, Sampling(1.0, 4)) for i in (1, 2)))
        sampler.replace_weights({}, 1)
        segments.append(await converse(sampler, 3, longer, 1, Sampling(1.0, 4)))
        assert largest_gap(segments, await trainer.logprobs([as_sample(s) for s in segments], 1.0)) < 1e-4


async def test_a_rewritten_context_is_computed_anew(engine: Engine) -> None:
    chance = random.Random(5)
    first, second = random_tokens(chance, 40), random_tokens(chance, 50)
    async with engine() as (sampler, trainer), sampler.session(0, 100) as session:
        segments = []
        for prompt in (first, second, first[:20] + second[:20]):
            segment = Segment()
            segment.read(prompt)
            segment.wrote(await session.sample(segment.tokens, Sampling(1.0, 10)))
            segments.append(segment)
        assert largest_gap(segments, await trainer.logprobs([as_sample(s) for s in segments], 1.0)) < 1e-4


async def test_new_weights_come_between_tokens_and_each_token_tells_its_version(engine: Engine) -> None:
    prompt = random_tokens(random.Random(0), 30)
    async with engine() as (sampler, _), sampler.session(0, 100) as session:
        asked = asyncio.create_task(session.sample(prompt, Sampling(1.0, 400)))
        while sampler.sampled_tokens < 20:  # noqa: ASYNC110  # the engine's thread counts, and has no event to wait for
            await asyncio.sleep(0.001)
        sampler.replace_weights({}, 1)
        completion = await asked
    assert set(completion.versions) == {0, 1}
    assert completion.versions == sorted(completion.versions)


async def test_a_cancelled_request_leaves_the_others_alone(engine: Engine) -> None:
    prompt = random_tokens(random.Random(0), 30)
    async with engine() as (sampler, _):
        async with sampler.session(0, 100) as session, sampler.session(1, 100) as other:
            long = asyncio.create_task(session.sample(prompt, Sampling(1.0, 3000)))
            await asyncio.sleep(0.05)
            long.cancel()
            completion = await other.sample(prompt, Sampling(1.0, 5))
            assert isinstance(completion, Completion)
            again = await session.sample(prompt, Sampling(1.0, 5))  # and its session can go on
            assert len(again.tokens) == 5
        assert sampler.sampled_tokens < 3000


async def test_who_waits_for_a_shared_prompt_goes_on_when_its_first_user_leaves(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("palestra.backends.torch.sampler.PREFILL_TOKENS", 4)
    prompt = random_tokens(random.Random(0), 3000)
    async with engine() as (sampler, _):
        async with sampler.session(0, 100) as session:
            first = asyncio.create_task(session.sample(prompt, Sampling(1.0, 5)))
            while not sampler.prefilled_tokens:  # noqa: ASYNC110  # the engine's thread counts, and has no event to wait for
                await asyncio.sleep(0.001)
            async with sampler.session(1, 100) as other:
                second = asyncio.create_task(other.sample(prompt, Sampling(1.0, 5)))
                await asyncio.sleep(0.02)
                first.cancel()
                assert sampler.prefilled_tokens < 2900, "the prompt was to be cut short in the middle"
        async with sampler.session(2, 100) as late:
            monkeypatch.setattr("palestra.backends.torch.sampler.PREFILL_TOKENS", 1024)
            completion = await asyncio.wait_for(late.sample(prompt, Sampling(1.0, 5)), 30)
        assert len(completion.tokens) == 5
        second.cancel()


async def test_stop_tokens_and_limits_end_a_reply(engine: Engine) -> None:
    prompt = random_tokens(random.Random(0), 30)
    everything = frozenset(range(VOCABULARY))
    async with engine() as (sampler, _), sampler.session(0, 100) as session:
        stopped = await session.sample(prompt, Sampling(1.0, 9, everything))
        cut = await session.sample(prompt, Sampling(1.0, 9))
    assert (len(stopped.tokens), stopped.finish) == (1, "stop")
    assert (len(cut.tokens), cut.finish) == (9, "length")


async def test_a_prompt_of_one_token_works(engine: Engine) -> None:
    async with engine() as (sampler, trainer):
        segment = await converse(sampler, 0, [5], 2, Sampling(1.0, 6))
        assert largest_gap([segment], await trainer.logprobs([as_sample(segment)], 1.0)) < 1e-4


async def test_greedy_takes_the_likeliest_token(engine: Engine) -> None:
    prompt = random_tokens(random.Random(0), 30)
    async with engine() as (sampler, _):
        replies = [await converse(sampler, seed, prompt, 1, Sampling(0.0, 10)) for seed in (1, 2)]
    assert replies[0].tokens[:40] == replies[1].tokens[:40]


async def test_a_rollout_that_can_never_fit_is_refused(engine: Engine) -> None:
    async with engine(kv_tokens=500) as (sampler, _):
        with pytest.raises(InfrastructureError, match="501 tokens"):
            async with sampler.session(0, 501):
                pass


async def test_a_broken_engine_tells_those_who_wait(engine: Engine) -> None:
    async with engine() as (sampler, _), sampler.session(0, 100) as session:
        with pytest.raises(InfrastructureError, match="it failed"):
            await session.sample([10**6, 3, 4], Sampling(1.0, 5))
        with pytest.raises(InfrastructureError, match="has stopped"):
            await session.sample([3, 4], Sampling(1.0, 5))


async def test_a_model_that_gives_no_numbers_ends_the_run_and_not_only_its_rollouts(engine: Engine) -> None:
    async with engine() as (sampler, _), sampler.session(0, 100) as session:
        sampler.replace_weights({"model.norm.weight": torch.full((48,), torch.nan)}, 1)
        for _ in range(2):
            with pytest.raises(ModelError, match="the model's logits are not finite: training has diverged"):
                await session.sample([5, 6, 7], Sampling(1.0, 4))


def test_draws_follow_the_distribution() -> None:
    torch.manual_seed(0)
    logits = torch.randn(700) * 3
    count = 40_000
    uniforms = torch.linspace(0, 1, count + 1, dtype=torch.float64)[:-1]
    tokens, logprobs = draw(logits.expand(count, -1), torch.full((count,), 0.8), uniforms)
    expected = (logits / 0.8).softmax(-1)
    shares = torch.bincount(tokens, minlength=700) / count
    assert (shares - expected).abs().max() < 2 / count + 1e-6
    assert torch.allclose(logprobs, expected[tokens].log(), atol=1e-4)
    assert len(Counter(tokens.tolist())) > 100


def test_a_draw_at_the_very_end_stays_within_the_mass() -> None:
    logits = torch.full((1, 300), float("-inf"))
    logits[0, 17] = 0.0
    for point in (0.0, 0.5, 1.0 - 1e-17):
        token, logprob = draw(logits, torch.ones(1), torch.tensor([point], dtype=torch.float64))
        assert token.item() == 17
        assert logprob.item() == 0.0
