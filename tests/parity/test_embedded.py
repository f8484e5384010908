"""The embedded backend makes of the recorded trajectories what the file says. tests/bridges/*/test_replay.py say so of the
others."""

from itertools import pairwise

import pytest
from parity.recorded import LOSSES, MASKED, credited, embedded_loss, name_of, recorded

from palestra.advantage import credit
from palestra.config import Loss


def test_everything_that_can_be_odd_is_there() -> None:
    credits = [(group, credit(group, "grpo", masked_stops=MASKED)) for group in recorded().groups]
    trained = [(group, given) for group, given in credits if given.outcome == "trained"]
    assert 3 <= len(trained) < len(credits)
    assert sum(given.failed for _, given in trained) > 0
    assert sum(given.masked for _, given in trained) > 0
    segments = [
        [s for s in t.segments if any(s.mask)] for group, _ in trained for t in group.trajectories if t.stop not in MASKED
    ]
    assert max(map(len, segments)) > 1
    turns = [sum(b and not a for a, b in pairwise(s.mask)) for attempt in segments for s in attempt]
    assert max(turns) > 1


def test_tokens_masks_logprobs_and_advantages() -> None:
    for made, expected in zip(credited(recorded().groups), recorded().samples, strict=True):
        assert (made.tokens, made.mask, made.logprobs) == (expected.tokens, expected.mask, expected.logprobs)
        assert made.advantage == pytest.approx(expected.advantage, rel=1e-9)


@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
def test_the_losses(loss: Loss) -> None:
    found = embedded_loss(recorded().samples, recorded().now, loss)
    assert found == pytest.approx(recorded().losses[name_of(loss)], rel=1e-5)
