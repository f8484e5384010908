"""Losses against formulas written out naively, token by token, in plain Python floats."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from palestra.config import Loss
from palestra.loss import Tokens, normaliser, policy_loss

KINDS = ("importance_sampling", "ppo", "gspo", "cispo", "cross_entropy")
REDUCTIONS = ("token_mean", "sequence_mean", "constant")


@dataclass
class Sequence:
    new: list[float]
    old: list[float]
    reference: list[float]
    advantage: float
    weight: float


logprob = st.floats(-3, -0.01)


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    rows = draw(st.lists(st.tuples(logprob, logprob, logprob), min_size=1, max_size=4))
    new, old, reference = (list(column) for column in zip(*rows, strict=True))
    return Sequence(new, old, reference, draw(st.floats(-2, 2)), draw(st.sampled_from([0.25, 0.5, 1.0])))


batches = st.lists(sequences(), min_size=1, max_size=5)


def flat(batch: list[Sequence]) -> tuple[Tensor, Tokens]:
    def spread(values: list[float]) -> Tensor:
        return torch.tensor([v for v, s in zip(values, batch, strict=True) for _ in s.new], dtype=torch.float64)

    def joined(name: str) -> Tensor:
        return torch.tensor([x for s in batch for x in getattr(s, name)], dtype=torch.float64)

    tokens = Tokens(
        old_logprobs=joined("old"),
        advantages=spread([s.advantage for s in batch]),
        weights=spread([s.weight for s in batch]),
        sequence=torch.tensor([i for i, s in enumerate(batch) for _ in s.new]),
        lengths=torch.tensor([len(s.new) for s in batch]),
        reference=joined("reference"),
    )
    return joined("new").requires_grad_(), tokens


def gradient(batch: list[Sequence], spec: Loss) -> tuple[float, list[float]]:
    logprobs, tokens = flat(batch)
    loss, _ = policy_loss(logprobs, tokens, spec)
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.tolist()


def one(new: list[float], old: list[float], advantage: float) -> list[Sequence]:
    return [Sequence(new, old, old, advantage, 1.0)]


def at_ratio(ratio: float, advantage: float, spec: Loss) -> tuple[float, float]:
    """Loss and gradient of one token at a given ratio."""
    loss, (slope,) = gradient(one([-1.0 + math.log(ratio)], [-1.0], advantage), spec)
    return loss, slope


def naive_token(kind: str, new: float, ratio: float, advantage: float, spec: Loss) -> float:
    bounded = min(max(ratio, 1 - spec.clip_low), 1 + spec.clip_high)
    if kind == "cross_entropy":
        return -new
    if kind == "importance_sampling":
        return -ratio * advantage
    if kind == "cispo":
        return -bounded * advantage * new
    objective = min(ratio * advantage, bounded * advantage)
    if spec.dual_clip is not None and advantage < 0:
        objective = max(objective, spec.dual_clip * advantage)
    return -objective


def naive_loss(batch: list[Sequence], spec: Loss) -> float:
    total = 0.0
    for s in batch:
        length = len(s.new)
        mean_ratio = math.prod(math.exp(n - o) for n, o in zip(s.new, s.old, strict=True)) ** (1 / length)
        for new, old, reference in zip(s.new, s.old, s.reference, strict=True):
            ratio = mean_ratio if spec.kind == "gspo" else math.exp(new - old)
            if spec.truncate is None:
                loss = naive_token(spec.kind, new, ratio, s.advantage, spec)
            else:
                loss = naive_token(spec.kind, new, 1.0, s.advantage, spec) * min(math.exp(new - old), spec.truncate)
            loss += spec.kl * (math.exp(reference - new) - (reference - new) - 1)
            total += s.weight * loss / (length if spec.reduction == "sequence_mean" else 1)
    return total


@settings(max_examples=40, deadline=None)
@given(batches, st.sampled_from(REDUCTIONS), st.sampled_from([0.0, 0.3]), st.sampled_from([None, 0.5, 2.0]))
@pytest.mark.parametrize("kind", KINDS)
def test_every_loss_is_its_formula(kind: str, batch: list[Sequence], reduction: str, kl: float, truncate: float | None) -> None:
    spec = Loss(
        kind=kind,
        clip_low=0.1,
        clip_high=0.3,
        dual_clip=2.0 if kind in ("ppo", "gspo") else None,
        reduction=reduction,
        kl=kl,
        truncate=truncate if kind != "cross_entropy" else None,
    )
    assert gradient(batch, spec)[0] == pytest.approx(naive_loss(batch, spec), rel=1e-9, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(batches, st.sampled_from(REDUCTIONS), st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_order_and_batching_do_not_matter(kind: str, batch: list[Sequence], reduction: str, data: st.DataObject) -> None:
    spec = Loss(kind=kind, reduction=reduction, kl=0.1)
    whole, together = gradient(batch, spec)
    offsets = [sum(len(s.new) for s in batch[:i]) for i in range(len(batch))]

    part_of = [data.draw(st.integers(0, 2)) for _ in batch]
    total, apart = 0.0, [math.nan] * len(together)
    for part in (2, 0, 1):
        members = [i for i, p in enumerate(part_of) if p == part]
        if not members:
            continue
        loss, slopes = gradient([batch[i] for i in members], spec)
        total += loss
        for i in members:
            for offset in range(offsets[i], offsets[i] + len(batch[i].new)):
                apart[offset] = slopes.pop(0)
    assert total == pytest.approx(whole, rel=1e-9, abs=1e-9)
    assert apart == pytest.approx(together, rel=1e-12, abs=1e-12)


# Away from the kinks at the clip bounds, and without the stop-gradients of cispo, autograd must agree with finite differences.
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ["importance_sampling", "ppo", "gspo", "cross_entropy"])
def test_gradients_agree_with_finite_differences(kind: str, reduction: str) -> None:
    batch = [
        Sequence([-1.0, -0.5, -2.0], [-1.1, -0.45, -1.5], [-1.2, -0.3, -2.0], 1.5, 0.5),
        Sequence([-0.7, -0.9], [-0.2, -1.9], [-0.8, -0.4], -0.5, 1.0),
    ]
    logprobs, tokens = flat(batch)
    spec = Loss(kind=kind, reduction=reduction, kl=0.3)
    assert torch.autograd.gradcheck(lambda x: policy_loss(x, tokens, spec)[0], (logprobs,))


def test_cispo_weighs_the_gradient_of_the_logprob() -> None:
    spec = Loss(kind="cispo", clip_low=0.5, clip_high=1.0)
    for ratio, bounded in [(0.1, 0.5), (0.8, 0.8), (1.7, 1.7), (5.0, 2.0)]:
        for advantage in (2.0, -2.0):
            assert at_ratio(ratio, advantage, spec)[1] == pytest.approx(-bounded * advantage)


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [
        (1.25, 1.0, -1.25),  # inside the wide upper bound
        (1.35, 1.0, 0.0),  # above it
        (0.5, 1.0, -0.5),  # a good token that became unlikely is always pulled back
        (0.85, -1.0, 0.0),  # below the narrow lower bound
        (0.95, -1.0, 0.95),
        (5.0, -1.0, 5.0),  # without a dual clip nothing bounds this one
    ],
)
def test_ppo_clips_with_separate_bounds(ratio: float, advantage: float, slope: float) -> None:
    assert at_ratio(ratio, advantage, Loss(kind="ppo", clip_low=0.1, clip_high=0.3))[1] == pytest.approx(slope)


def test_dual_clip_acts_only_on_bad_tokens_that_became_likely() -> None:
    plain, dual = Loss(kind="ppo"), Loss(kind="ppo", dual_clip=3.0)
    assert at_ratio(5.0, -1.0, plain) == pytest.approx((5.0, 5.0))
    assert at_ratio(5.0, -1.0, dual) == pytest.approx((3.0, 0.0))
    assert at_ratio(2.9, -1.0, dual) == pytest.approx((2.9, 2.9))
    for ratio in (0.1, 0.9, 1.0, 1.1, 5.0):
        assert at_ratio(ratio, 1.0, dual) == at_ratio(ratio, 1.0, plain)


def test_gspo_is_the_sequence_formula() -> None:
    new, old, advantage = [-1.0, -2.0, -0.5], [-1.2, -1.9, -0.6], 2.0
    spec = Loss(kind="gspo", clip_low=0.5, clip_high=0.5, reduction="sequence_mean")
    loss, slopes = gradient(one(new, old, advantage), spec)

    x = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    ratio = (x - torch.tensor(old, dtype=torch.float64)).mean().exp()
    expected = -torch.minimum(ratio * advantage, ratio.clamp(0.5, 1.5) * advantage)
    expected.backward()
    assert loss == pytest.approx(expected.item())
    assert x.grad is not None
    assert slopes == pytest.approx(x.grad.tolist())


def test_gspo_clips_the_whole_sequence_or_nothing() -> None:
    narrow = Loss(kind="gspo", clip_low=0.01, clip_high=0.01)
    assert gradient(one([-0.5, -1.0], [-1.0, -1.0], 1.0), narrow)[1] == [0.0, 0.0]
    # Token ratios far outside the bounds, whose mean is 1, are not clipped, though PPO would clip the first.
    balanced = one([-0.5, -1.5], [-1.0, -1.0], 1.0)
    assert gradient(balanced, narrow)[1] == pytest.approx([-1.0, -1.0])
    assert gradient(balanced, narrow.model_copy(update={"kind": "ppo"}))[1][0] == 0.0


def test_gspo_takes_an_advantage_for_each_token() -> None:
    logprobs, tokens = flat(one([-1.0, -2.0], [-1.1, -1.9], 0.0))
    tokens.advantages = torch.tensor([1.0, -3.0], dtype=torch.float64)
    policy_loss(logprobs, tokens, Loss(kind="gspo"))[0].backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1.0, 3.0])  # the sequence's ratio is 1


def test_truncated_weights_carry_no_gradient_of_their_own_and_replace_the_clip() -> None:
    spec = Loss(kind="ppo", truncate=2.0)
    assert at_ratio(1.5, 1.0, spec) == pytest.approx((-1.5, -1.5))  # beyond PPO's bound, not clipped
    assert at_ratio(5.0, 1.0, spec) == pytest.approx((-2.0, -2.0))  # capped, and still a gradient
    assert at_ratio(0.3, -1.0, spec) == pytest.approx((0.3, 0.3))


def test_truncation_leaves_the_kl_alone() -> None:
    batch = [Sequence([-1.0], [-3.0], [-1.5], 0.0, 1.0)]
    plain = gradient(batch, Loss(kind="importance_sampling", kl=1.0))
    assert gradient(batch, Loss(kind="importance_sampling", kl=1.0, truncate=0.1)) == plain
    assert plain[0] == pytest.approx(math.exp(-0.5) - 0.5)


def test_cross_entropy_ignores_advantages() -> None:
    batch = [Sequence([-1.0, -2.0], [-9.0, -9.0], [0, 0], -7.0, 0.5)]
    assert gradient(batch, Loss(kind="cross_entropy")) == (1.5, [-0.5, -0.5])


@pytest.mark.parametrize(("reduction", "expected"), [("token_mean", 10.0), ("sequence_mean", 4.0), ("constant", 400.0)])
def test_the_normaliser_of_each_reduction(reduction: str, expected: float) -> None:
    assert normaliser(Loss(reduction=reduction, constant=100.0), tokens_total=10.0, sequences_total=4.0) == expected


@given(batches)
@settings(max_examples=40, deadline=None)
def test_normalised_losses_are_the_means_that_they_are_named_after(batch: list[Sequence]) -> None:
    def normalised(reduction: str) -> float:
        spec = Loss(kind="cross_entropy", reduction=reduction, constant=50.0)
        tokens_total = sum(s.weight * len(s.new) for s in batch)
        return gradient(batch, spec)[0] / normaliser(spec, tokens_total, sum(s.weight for s in batch))

    weights = sum(s.weight for s in batch)
    tokens = [(s.weight, -new) for s in batch for new in s.new]
    assert normalised("token_mean") == pytest.approx(sum(w * x for w, x in tokens) / sum(w for w, _ in tokens))
    assert normalised("sequence_mean") == pytest.approx(sum(s.weight * -sum(s.new) / len(s.new) for s in batch) / weights)
    assert normalised("constant") == pytest.approx(sum(s.weight * -sum(s.new) / 50 for s in batch) / weights)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gap", [-1e4, 1e4])
def test_an_absurd_logprob_stays_finite(kind: str, gap: float) -> None:
    batch = [Sequence([-1.0], [-1.0 - gap], [-1.0 - gap], -1.0, 1.0)]
    loss, slopes = gradient(batch, Loss(kind=kind, kl=0.1))
    assert math.isfinite(loss)
    assert math.isfinite(slopes[0])


def test_metrics_are_sums_over_tokens() -> None:
    ratios = [1.5, 0.9, 1.1, 0.5]
    batch = one([-1 + math.log(r) for r in ratios], [-1.0] * 4, 1.0)
    logprobs, tokens = flat(batch)
    _, metrics = policy_loss(logprobs, tokens, Loss(kind="ppo", kl=0.1))
    values = {name: value.item() for name, value in metrics.items()}
    assert not any(value.requires_grad for value in metrics.values())
    assert values == pytest.approx(
        {
            "clipped": 1,  # a low ratio is not clipped for a good token
            "ratio": sum(ratios),
            "logprob_gap": sum(abs(math.log(r)) for r in ratios),
            "logprob_gap_max": math.log(2),
            "kl_sampler": sum(r - 1 - math.log(r) for r in ratios),
            "kl_reference": sum(1 / r - 1 + math.log(r) for r in ratios),  # here the reference is the old policy
        }
    )


@pytest.mark.parametrize(
    ("spec", "advantage", "clipped"),
    [
        (Loss(kind="ppo"), -1.0, 1),
        (Loss(kind="ppo", dual_clip=1.4), -1.0, 2),
        (Loss(kind="cispo"), 1.0, 2),
        (Loss(kind="importance_sampling"), 1.0, 0),
        (Loss(kind="importance_sampling", truncate=1.2), 1.0, 1),
    ],
)
def test_clipped_counts_the_tokens_at_which_a_bound_acted(spec: Loss, advantage: float, clipped: int) -> None:
    logprobs, tokens = flat(one([-1 + math.log(r) for r in (1.5, 0.9, 1.1, 0.5)], [-1.0] * 4, advantage))
    assert policy_loss(logprobs, tokens, spec)[1]["clipped"].item() == clipped


def test_kl_needs_a_reference() -> None:
    logprobs, tokens = flat(one([-1.0], [-1.0], 1.0))
    with pytest.raises(ValueError, match="reference"):
        policy_loss(logprobs, replace(tokens, reference=None), Loss(kl=0.1))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("cispo", {"dual_clip": 3.0}),
        ("ppo", {"dual_clip": 0.9}),
        ("cross_entropy", {"truncate": 2.0}),
        ("ppo", {"truncate": 0.0}),
    ],
)
def test_a_knob_that_could_not_be_honoured_is_refused(kind: str, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Loss(kind=kind, **options)
