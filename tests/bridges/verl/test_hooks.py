"""What verl hands us and loads from us, piece by piece: answers of a server, a buffer that does not wait for ever, one segment
for each attempt on the classic trainer."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

import torch
from bridges.verl.attempts import attempt
from verl.workers.rollout.replica import TokenOutput

from palestra.bridges.verl.cpu.server import merged
from palestra.bridges.verl.loop import PalestraLoop, output
from palestra.bridges.verl.rows import rows
from palestra.bridges.verl.sampler import completion
from palestra.bridges.verl.trainer_hooks import WatchedBuffer
from palestra.errors import InfrastructureError, PalestraError, UsageError
from palestra.protocols import Sampling

SAMPLING = Sampling(1.0, 4, frozenset({9}))


def test_an_answer_is_a_completion() -> None:
    given = completion(TokenOutput(token_ids=[5, 9], log_probs=[-1.0, -0.5], extra_fields={"global_steps": 3}), SAMPLING)
    assert (given.tokens, given.logprobs, given.versions, given.finish) == ([5, 9], [-1.0, -0.5], [3, 3], "stop")
    assert completion(TokenOutput(token_ids=[5], log_probs=[-1.0]), SAMPLING).finish == "length"


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ({"token_ids": [], "log_probs": []}, "0 tokens"),
        ({"token_ids": [1] * 5, "log_probs": [-1.0] * 5}, "5 tokens"),
        ({"token_ids": [1, 2], "log_probs": None}, "0 logprobs for 2 tokens"),
        ({"token_ids": [1, 2], "log_probs": [-1.0]}, "1 logprobs for 2 tokens"),
        ({"token_ids": [1], "log_probs": [float("nan")]}, "that are none"),
        ({"token_ids": [1], "log_probs": [2.5]}, "that are none"),
        ({"token_ids": [1], "log_probs": [-1.0], "stop_reason": "aborted"}, "aborted"),
    ],
)
def test_garbage_is_the_servers_failure(answer: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InfrastructureError, match=complaint):
        completion(TokenOutput(**answer), SAMPLING)


def test_a_buffer_in_which_nothing_ends_complains() -> None:
    buffer = WatchedBuffer(
        sampler_kwargs={"stall_seconds": 0.3},
        trainer_mode="sync",
        trainer_config={},
        max_off_policy_threshold=8,
        max_off_policy_strategy="drop",
    )
    buffer.running_keys["train"].add("a")
    buffer._wait_for_next_poll("train", time.time())
    buffer.partitions["train"]["a_0_0"] = {}  # one has ended, and the clock begins anew
    buffer._wait_for_next_poll("train", time.time())
    buffer._wait_for_next_poll("train", time.time())
    time.sleep(0.3)
    with pytest.raises(PalestraError, match=r"no rollout has ended for 0\.3 s, and 1 groups are not complete"):
        buffer._wait_for_next_poll("train", time.time())


def test_the_classic_trainer_is_refused_several_segments_by_name() -> None:
    loop = PalestraLoop.__new__(PalestraLoop)
    renderer = SimpleNamespace(stop_ids={9})
    loop._scene = SimpleNamespace(config=SimpleNamespace(training=None), renderer=renderer)  # type: ignore[assignment]
    long = next(t for t in (attempt(seed, 0, 1.0) for seed in range(99)) if len(t.segments) == 2)
    loop._verl = SimpleNamespace(trainer=SimpleNamespace(use_v1=True))
    assert len(loop._handed_back(long, 0)) == 2  # type: ignore[arg-type]
    loop._verl = SimpleNamespace(trainer=SimpleNamespace(use_v1=False))
    with pytest.raises(UsageError, match=r"2 segments, and verl's classic trainer takes one .* trainer\.use_v1 = true"):
        loop._handed_back(long, 0)


def test_an_output_has_what_the_trajectory_has() -> None:
    trajectory = attempt(1, 0, 0.5)
    row = rows(trajectory, False, 9)[0]
    made = output(row, trajectory, 7)
    assert (made.prompt_ids, made.response_ids, made.response_mask) == (row.prompt, row.response, row.mask)
    assert (made.response_logprobs, made.reward_score, made.extra_fields["failed"]) == (row.logprobs, 0.5, "")
    assert made.as_dict()["rm_scores"].sum().item() == 0.5


def test_an_adapter_is_merged_into_the_weights_that_it_found() -> None:
    base = {"model.q.weight": torch.ones(2, 3), "model.k.weight": torch.zeros(2, 3)}
    down, up = torch.randn(1, 3), torch.randn(2, 1)
    adapter = {"base_model.model.model.q.lora_A.weight": down, "base_model.model.model.q.lora_B.weight": up}
    new = merged(base, adapter, 2.0)
    assert list(new) == ["model.q.weight"]
    torch.testing.assert_close(new["model.q.weight"], 1 + 2 * up @ down)
