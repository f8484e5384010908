import math
import random
from itertools import combinations

import pytest

from palestra.evaluation import summarise
from palestra.statistics import Estimate, difference, mean, pass_at
from palestra.trajectory import Failure, Trajectory


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [  # Wilson's intervals, from Newcombe (1998), table I, and Brown, Cai and DasGupta (2001)
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilsons_interval(right: int, n: int, low: float, high: float) -> None:
    estimate = mean([1.0] * right + [0.0] * (n - right))
    assert estimate.value == pytest.approx(right / n)
    assert (round(estimate.low, 4), round(estimate.high, 4)) == (low, high)


def test_success_and_failure_are_mirror_images() -> None:
    some, others = mean([1.0] * 3 + [0.0] * 7), mean([0.0] * 3 + [1.0] * 7)
    assert (some.low, some.high) == pytest.approx((1 - others.high, 1 - others.low))


def test_values_in_between_have_a_normal_interval() -> None:
    values = [0.25, 0.5, 0.75, 1.0]
    estimate = mean(values)
    half = 1.959964 * math.sqrt(sum((v - 0.625) ** 2 for v in values) / 3 / 4)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((0.625, 0.625 - half, 0.625 + half))


def test_an_interval_stays_between_0_and_1_and_has_a_width() -> None:
    chance = random.Random(0)
    for _ in range(200):
        values = [chance.choice([0.0, 0.5, 1.0]) for _ in range(chance.randint(1, 9))]
        estimate = mean(values)
        assert 0.0 <= estimate.low <= estimate.value <= estimate.high <= 1.0
        assert estimate.high - estimate.low > 0.05, "so few values cannot say so much"


def test_nothing_measured_says_nothing() -> None:
    estimate = mean([])
    assert math.isnan(estimate.value)
    assert (estimate.low, estimate.high) == (0.0, 1.0)


def test_the_interval_covers_what_it_should() -> None:
    """Of many samples, 95% of the intervals hold the true rate, give or take."""
    chance = random.Random(1)
    for rate in (0.1, 0.5, 0.9):
        hits = 0
        for _ in range(1000):
            estimate = mean([float(chance.random() < rate) for _ in range(40)])
            hits += estimate.low <= rate <= estimate.high
        assert 915 <= hits <= 985


def brute_force(k: int, attempts: list[float]) -> float:
    chosen = list(combinations(attempts, k))
    return sum(max(some) >= 1.0 for some in chosen) / len(chosen)


def test_pass_at_k_is_what_counting_all_subsets_gives() -> None:
    chance = random.Random(2)
    for k in (1, 2, 4):
        rewards = {str(task): [float(chance.random() < 0.4) for _ in range(chance.randint(k, 7))] for task in range(6)}
        expected = sum(brute_force(k, attempts) for attempts in rewards.values()) / len(rewards)
        assert pass_at(k, rewards).value == pytest.approx(expected)


def test_the_task_is_the_unit() -> None:
    """Many attempts at two tasks say no more of other tasks than two tasks can."""
    few, many = {"a": [1.0], "b": [0.0]}, {"a": [1.0] * 500, "b": [0.0] * 500}
    assert pass_at(1, few) == pass_at(1, many)


def test_only_a_full_reward_is_a_success() -> None:
    assert pass_at(1, {"a": [0.999], "b": [1.0], "c": [1.5]}).value == pytest.approx(2 / 3)


def test_too_few_attempts_are_refused() -> None:
    with pytest.raises(ValueError, match="pass@2 needs at least 2 attempts at each task, one has 1"):
        pass_at(2, {"a": [1.0, 0.0], "b": [1.0]})


def test_an_estimate_as_text() -> None:
    assert str(Estimate(0.5, 0.251, 0.749)) == "0.50 [0.25, 0.75]"


# Summaries of evaluations


def ended(task: str, index: int, reward: float) -> Trajectory:
    return Trajectory(task, index, reward=reward, stop="finish")


def failed(task: str, index: int) -> Trajectory:
    return Trajectory(task, index, failure=Failure("run", "infrastructure", "gone"))


def test_failures_are_counted_apart_and_never_as_reward_0() -> None:
    done = [ended("a", 0, 1.0), ended("b", 0, 1.0), failed("c", 0), failed("d", 0)]
    result = summarise(done, 1, 0.0)
    assert (result.success.value, result.reward, result.tasks) == (1.0, 1.0, 2)
    assert result.failures == {"run/infrastructure": 2}
    assert result.stops == {"finish": 2}


def test_pass_at_powers_of_two_and_at_as_many_as_every_task_has() -> None:
    five = [ended(task, index, float(index == 0)) for task in "ab" for index in range(5)]
    assert list(summarise(five, 5, 0.0).pass_at) == [1, 2, 4, 5]
    assert list(summarise([*five[:-3], failed("b", 2)], 5, 0.0).pass_at) == [1, 2]
    assert summarise(five, 5, 0.0).to_json()["pass@4"]["value"] == pytest.approx(0.8)


@pytest.mark.parametrize("reward", [-1.0, -0.25, 2.0, 100.0])
def test_rewards_need_not_be_between_0_and_1(reward: float) -> None:
    result = summarise([ended("a", 0, reward), ended("b", 0, reward)], 1, 0.0)
    assert (result.reward, result.success.value) == (reward, float(reward >= 1))


def test_when_everything_failed_there_is_no_rate() -> None:
    result = summarise([failed("a", 0)], 1, 0.0)
    assert math.isnan(result.success.value)
    assert math.isnan(result.reward)
    assert (result.tasks, result.failures) == (0, {"run/infrastructure": 1})


# Paired differences


def test_a_paired_difference_is_reproducible_and_the_mean_of_differences() -> None:
    before, after = [0.0, 0.5, 1.0, 0.0, 0.25], [1.0, 0.5, 1.0, 0.75, 0.25]
    estimate = difference(before, after)
    assert estimate.value == pytest.approx(0.35)
    assert estimate == difference(before, after)
    assert -1.0 <= estimate.low < estimate.value < estimate.high <= 1.0
    assert difference(after, before).value == pytest.approx(-0.35)


def test_pairs_say_more_than_two_samples() -> None:
    """Where tasks differ much from each other and both sides fail on the same ones, the difference is known far better."""
    before = [0.0] * 50 + [1.0] * 50
    after = [1.0] * 5 + [0.0] * 45 + [1.0] * 50
    apart = mean(after).low - mean(before).high
    paired = difference(before, after)
    assert paired.low > 0 > apart


def test_the_paired_interval_covers_what_it_should() -> None:
    chance = random.Random(3)
    hits = 0
    for _ in range(80):
        hard = [chance.random() for _ in range(40)]
        before = [float(chance.random() < 0.6 * p) for p in hard]
        after = [float(chance.random() < 0.6 * p + 0.2) for p in hard]
        estimate = difference(before, after)
        hits += estimate.low <= 0.2 <= estimate.high
    assert 70 <= hits <= 79


def test_no_change_at_all_is_no_proof_of_none() -> None:
    never = difference([0.0] * 30, [0.0] * 30)
    assert never.value == 0.0
    assert never.low == pytest.approx(-mean([0.0] * 30).high)
    assert never.high == pytest.approx(mean([0.0] * 30).high)
    always = difference([0.0] * 30, [1.0] * 30)
    assert 0.7 < always.low < always.value == always.high == 1.0
    assert math.isnan(difference([], []).value)


def test_only_the_same_tasks_can_be_paired() -> None:
    with pytest.raises(ValueError, match="shorter"):
        difference([0.0, 1.0], [1.0])
