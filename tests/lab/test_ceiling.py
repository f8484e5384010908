"""What no schedule can exceed: counted from the jobs, and above whatever was played."""

import pytest

from palestra.bench.dispatch import PIECE, own_setup
from palestra.lab import workload
from palestra.lab.ceiling import ceiling
from palestra.lab.own import simulate_own
from palestra.lab.workload import Workload


@pytest.mark.parametrize("whole_chunks", [False, True])
@pytest.mark.parametrize("shares_prompts", [False, True])
def test_the_bound_is_above_what_is_played(small: Workload, shares_prompts: bool, whole_chunks: bool) -> None:
    values = small.model_dump()
    values["engine"] |= {"shares_prompts": shares_prompts, "whole_chunks": whole_chunks}
    played_on = workload.parse(values)
    played = simulate_own(played_on, own_setup(played_on, 1), 0)
    shares = ceiling(played_on, 0, PIECE)
    assert played.of_limit < shares.with_tools < shares.bound


def jobs_of(small: Workload, turns: int, tool_seconds: float) -> Workload:
    """One job on one unit: 1,000 tokens, and after each tool 100 more; each reply has 100."""
    values = small.model_dump()
    values["batch"] = {"tasks": 1, "samples": 1, "steps": 1}
    values["turns"] |= {"median": turns, "task_sigma": 0, "sample_sigma": 0, "least": turns, "most": turns}
    values["output"] = values["observation"] = {"median": 100, "sigma": 0, "least": 100, "most": 100}
    values["tools"] |= {"median": tool_seconds, "sigma": 0, "slow_share": 0, "most": tool_seconds}
    values["context"] = {"start": 1000, "end": 20_000}
    values["engine"] |= {"units": 1, "kv_tokens": 22_000, "prefill_chunk": 512, "prefill_rate": 10_000}
    values["engine"] |= {"step_seconds": 0.02, "decode_seconds": 0.001, "whole_chunks": True}
    values["training"] = {"seconds": 1.0, "publish_seconds": 0.0}
    return workload.parse(values)


def generation(one: Workload, share: float) -> float:
    """The workload publishes for nothing."""
    return one.limits(one.draw(0, 0)).step / share - 1


def test_one_call_by_hand(small: Workload) -> None:
    one = jobs_of(small, turns=1, tool_seconds=5.0)
    shares = ceiling(one, 0)
    assert generation(one, shares.bound) == pytest.approx(0.02 * 102 * 1100 / 22_000 + 100 * 0.001 + 2 * 512 / 10_000)
    assert shares.with_tools == shares.bound  # nothing is kept after the last call


def test_prefill_that_takes_its_share_of_a_step(small: Workload) -> None:
    values = jobs_of(small, turns=1, tool_seconds=5.0).model_dump()
    values["engine"]["whole_chunks"] = False
    one = workload.parse(values)
    steps = 1000 / 512
    expected = pytest.approx(0.02 * (steps + 100) * 1100 / 22_000 + 100 * 0.001 + 1000 / 10_000)
    assert generation(one, ceiling(one, 0).bound) == expected


def test_attempts_that_share_their_prompt_by_hand(small: Workload) -> None:
    values = jobs_of(small, turns=1, tool_seconds=5.0).model_dump()
    values["batch"]["samples"] = 2
    values["engine"]["shares_prompts"] = True
    two = workload.parse(values)
    # The prompt's first 999 tokens are held once for both. The first attempt prefills two chunks, the other one chunk for the
    # prompt's last token.
    held, chunks = 2 * (1.5 + 100) * (1100 - 999 / 2), 3
    expected = pytest.approx(0.02 * held / 22_000 + 200 * 0.001 + chunks * 512 / 10_000)
    assert generation(two, ceiling(two, 0).bound) == expected


def test_publishing_takes_the_units_that_generate(small: Workload) -> None:
    one = jobs_of(small, turns=1, tool_seconds=5.0)
    values = one.model_dump()
    values["training"]["publish_seconds"] = 0.5
    slow = workload.parse(values)
    seconds = generation(one, ceiling(one, 0).with_tools)
    limit = slow.limits(slow.draw(0, 0)).step
    assert limit / ceiling(slow, 0).with_tools == pytest.approx(seconds + 1 + 0.5 * seconds / (seconds + 1))
    assert limit / ceiling(slow, 0).bound == pytest.approx(seconds + 1)


def test_one_call_in_pieces_by_hand(small: Workload) -> None:
    one = jobs_of(small, turns=1, tool_seconds=5.0)
    held = 2 * 1030 + 30 * (1030 + 1060 + 1090) + 10 * 1100  # two chunks, then three pieces of thirty and what is left
    expected = pytest.approx(0.02 * held / 22_000 + 100 * 0.001 + 2 * 512 / 10_000)
    assert generation(one, ceiling(one, 0, piece=30).bound) == expected


def test_a_wait_holds_kv_for_as_many_steps_as_are_made_meanwhile(small: Workload) -> None:
    one = jobs_of(small, turns=2, tool_seconds=0.5)
    seconds = generation(one, ceiling(one, 0).with_tools)
    steps = (seconds - 200 * 0.001 - 3 * 512 / 10_000) / 0.02
    assert steps * 22_000 == pytest.approx(102 * 1100 + 101 * 1300 + 1100 * 0.5 * steps / seconds)


def test_after_a_long_wait_prefilling_again_is_cheaper(small: Workload) -> None:
    one = jobs_of(small, turns=2, tool_seconds=50.0)
    held = 102 * 1100 + 103 * 1300  # two chunks more, of the second call
    assert generation(one, ceiling(one, 0).with_tools) == pytest.approx(0.02 * held / 22_000 + 200 * 0.001 + 5 * 512 / 10_000)
