"""What verl trains on is what our own trainer would: the same tokens, masks and logprobs, for every segment."""

import pytest
from bridges.verl.attempts import attempt

from palestra.advantage import credit
from palestra.bridges.verl.rows import attempt_label, attempts, rows, versions
from palestra.trajectory import Failure, Group, Segment, Trajectory

FILLER = 7


@pytest.mark.parametrize("seed", range(20))
def test_the_rows_are_the_samples(seed: int) -> None:
    group = Group("t", tuple(attempt(seed * 10 + index, index, float(index)) for index in range(3)))
    samples = credit(group, "grpo").samples
    made = [row for trajectory in group.trajectories for row in rows(trajectory, False, FILLER)]
    assert [row.prompt + row.response for row in made] == [list(sample.tokens) for sample in samples]
    assert [[0] * len(row.prompt) + row.mask for row in made] == [list(map(int, sample.mask)) for sample in samples]
    assert [[0.0] * len(row.prompt) + row.logprobs for row in made] == [list(sample.logprobs) for sample in samples]


@pytest.mark.parametrize("why", ["failed", "masked", "nothing sampled"])
def test_what_gives_no_sample_is_one_row_without_a_sampled_token(why: str) -> None:
    trajectory = attempt(0, 0, 1.0)
    if why == "failed":
        trajectory.reward, trajectory.failure = None, Failure("run", "bug", "it broke")
    if why == "nothing sampled":
        trajectory.segments = [Segment([1, 2], [False, False], [0.0, 0.0], [-1, -1])]
    [row] = rows(trajectory, why == "masked", FILLER)
    assert (row.prompt, row.response, row.mask, row.logprobs) == ([FILLER], [FILLER], [0], [0.0])


def test_versions_are_the_oldest_and_the_newest() -> None:
    segment = Segment([1, 2, 3], [False, True, True], [0.0, -1.0, -1.0], [-1, 4, 5])
    assert versions(Trajectory("t", 0, segments=[segment]), 9) == (4, 5)
    assert versions(Trajectory("t", 0), 9) == (9, 9)


def test_labels_say_which_rows_are_one_attempt() -> None:
    labels = [
        attempt_label("a-b", "0", False),
        attempt_label("a-b", "1", True),
        attempt_label("a-b", "0", False),
        "pad",
        "pad",
        "c",
    ]
    found = attempts(labels, [True, False, True, False, False, True])
    assert [(one.group, one.failed, one.places) for one in found] == [
        ("a-b", False, [0, 2]),
        ("a-b", True, [1]),
        ("pad", True, [3]),
        ("pad", True, [4]),
        ("c", False, [5]),
    ]


def test_a_labelled_attempt_that_sampled_nothing_has_still_ended() -> None:
    [one] = attempts([attempt_label("a", "0", False)], [False])
    assert not one.failed
