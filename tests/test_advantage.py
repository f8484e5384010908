import statistics
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.advantage import Estimator, advantages, credit
from palestra.trajectory import Completion, Failure, Group, Segment, Stop, Trajectory

rewards_lists = st.lists(st.floats(-10, 10, allow_subnormal=False), min_size=2, max_size=12)
estimators = st.sampled_from(get_args(Estimator))


def segment(sampled: int = 2) -> Segment:
    segment = Segment()
    segment.read([7, 8])
    segment.wrote(Completion(range(sampled), [-0.5] * sampled, [3] * sampled, "stop"))
    return segment


def attempt(reward: float | None, *segments: Segment, stop: Stop = "finish", failure: Failure | None = None) -> Trajectory:
    return Trajectory("t", 0, segments=list(segments) or [segment()], stop=stop, reward=reward, failure=failure)


def group(*trajectories: Trajectory) -> Group:
    return Group("t", trajectories)


FAILED = Failure("run", "infrastructure", "the sandbox died")


def test_values_by_hand() -> None:
    # mean 1, sample deviation sqrt((1 + 0 + 1) / 2) = 1
    assert advantages([0.0, 1.0, 2.0], "grpo") == pytest.approx([-1, 0, 1], abs=2e-6)
    assert advantages([0.0, 1.0, 2.0], "dr_grpo") == [-1, 0, 1]
    assert advantages([0.0, 1.0, 2.0], "rloo") == [-1.5, 0, 1.5]


@given(rewards_lists)
def test_rloo_leaves_the_reward_itself_out_of_its_baseline(rewards: list[float]) -> None:
    naive = [reward - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, reward in enumerate(rewards)]
    assert advantages(rewards, "rloo") == pytest.approx(naive, abs=1e-9)


@given(rewards_lists)
def test_grpo_divides_by_the_sample_deviation(rewards: list[float]) -> None:
    mean = sum(rewards) / len(rewards)
    deviation = (sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)) ** 0.5
    assert advantages(rewards, "grpo") == pytest.approx([(r - mean) / (deviation + 1e-6) for r in rewards], abs=1e-6)


@given(rewards_lists, estimators)
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(rewards: list[float], estimator: Estimator) -> None:
    result = advantages(rewards, estimator)
    assert sum(result) == pytest.approx(0, abs=1e-6)
    assert [a for _, a in sorted(zip(rewards, result, strict=True))] == sorted(result)


@given(st.floats(-10, 10), st.integers(2, 9), estimators)
def test_equal_rewards_give_exactly_zero(reward: float, count: int, estimator: Estimator) -> None:
    assert advantages([reward] * count, estimator) == [0.0] * count


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_one_reward_has_no_baseline(estimator: Estimator) -> None:
    with pytest.raises(ValueError, match="at least two"):
        advantages([1.0], estimator)


def test_a_sample_is_its_segment_with_the_trajectory_s_advantage() -> None:
    result = credit(group(attempt(1.0), attempt(0.0)), "dr_grpo")
    assert result.outcome == "trained"
    assert [sample.advantage for sample in result.samples] == [0.5, -0.5]
    first = result.samples[0]
    assert (first.tokens, first.mask) == ([7, 8, 0, 1], [False, False, True, True])
    assert (first.logprobs, first.versions) == ([0, 0, -0.5, -0.5], [-1, -1, 3, 3])
    assert (first.weight, first.task_id) == (1.0, "t")


def test_a_failure_leaves_the_group_and_its_baseline() -> None:
    # Even with a reward on it: one that failed after scoring is still a failure.
    result = credit(group(attempt(1.0), attempt(0.0), attempt(9.0, failure=FAILED), attempt(None, failure=FAILED)), "dr_grpo")
    assert [sample.advantage for sample in result.samples] == [0.5, -0.5]
    assert (result.failed, result.masked) == (2, 0)


def test_a_masked_stop_stays_in_the_baseline_and_gives_no_samples() -> None:
    trajectories = group(attempt(1.0), attempt(1.0), attempt(-2.0, stop="turns"))
    result = credit(trajectories, "dr_grpo", masked_stops=frozenset({"turns"}))
    assert [sample.advantage for sample in result.samples] == [1.0, 1.0]
    assert (result.outcome, result.masked) == ("trained", 1)
    assert len(credit(trajectories, "dr_grpo").samples) == 3


def test_a_group_below_the_minimum_is_dropped_and_counted() -> None:
    trajectories = group(attempt(1.0), attempt(0.0), attempt(None, failure=FAILED))
    dropped = credit(trajectories, "grpo", min_group=3)
    assert (dropped.samples, dropped.outcome, dropped.failed) == ([], "too_small", 1)
    assert credit(trajectories, "grpo", min_group=2).outcome == "trained"
    assert credit(group(attempt(None, failure=FAILED)), "grpo").outcome == "too_small"


def test_a_group_without_spread_is_filtered_unless_kept() -> None:
    trajectories = group(attempt(0.1), attempt(0.1), attempt(0.1))
    assert credit(trajectories, "grpo").outcome == "no_spread"
    assert credit(trajectories, "grpo").samples == []
    kept = credit(trajectories, "grpo", keep_flat=True)
    assert (kept.outcome, [sample.advantage for sample in kept.samples]) == ("trained", [0.0, 0.0, 0.0])


def test_what_is_read_after_the_last_reply_is_not_computed() -> None:
    segment = Segment()
    segment.read([1, 2])
    segment.wrote(Completion([3, 4], [-0.1, -0.2], [0, 0], "stop"))
    segment.read([5, 6, 7])
    group = Group("t", tuple(Trajectory("t", i, segments=[segment], reward=float(i), stop="turns") for i in range(2)))
    for sample in credit(group, "grpo").samples:
        assert (sample.tokens, sample.mask) == ([1, 2, 3, 4], [False, False, True, True])
        assert (sample.logprobs, sample.versions) == ([0.0, 0.0, -0.1, -0.2], [-1, -1, 0, 0])


def test_segments_without_sampled_tokens_give_no_samples() -> None:
    result = credit(group(attempt(1.0, segment(), segment(0)), attempt(0.0, segment(0))), "dr_grpo")
    assert [sample.advantage for sample in result.samples] == [0.5]


def test_the_segments_of_a_trajectory_count_one_each_or_one_together() -> None:
    trajectories = group(attempt(1.0, segment(), segment(0), segment()), attempt(0.0))
    weights = {
        rule: [sample.weight for sample in credit(trajectories, "grpo", segment_weight=rule).samples]
        for rule in ("segment", "trajectory")
    }
    # The segment that gives no sample takes no share: the trajectory's samples weigh 1 together.
    assert weights == {"segment": [1, 1, 1], "trajectory": [0.5, 0.5, 1]}


def test_a_missing_reward_without_a_failure_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="trajectory 0 of task 't' has neither a reward nor a failure"):
        credit(group(attempt(1.0), attempt(None)), "grpo")
