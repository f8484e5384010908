"""What verl's v1 trainer loads from us by name: the buffer that hands it its batches, and the callback after its checkpoints."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import transfer_queue as tq
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.utils import tensordict_utils as tu

from palestra.bridges.verl import estimator  # noqa: F401  # registers our estimators in the trainer's process
from palestra.bridges.verl.rows import attempt_label
from palestra.bridges.verl.scene import RECORD
from palestra.errors import PalestraError

POLL_SECONDS = 0.2


class WatchedBuffer(ReplayBuffer):  # type: ignore[misc]  # verl has no types
    """verl's own buffer, which also tells our estimator which rows are one attempt, and does not wait for ever."""

    def __init__(self, sampler_kwargs: Any, **settings: Any) -> None:
        super().__init__(sampler_kwargs=sampler_kwargs, poll_interval=POLL_SECONDS, **settings)
        self._patience = float(sampler_kwargs["stall_seconds"])
        self._ended, self._since = -1, time.monotonic()

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        self._ended, self._since = -1, time.monotonic()
        batch, metrics = super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        if partition_id == "train":
            self._label(batch, global_steps)
        return batch, metrics

    def _label(self, batch: Any, global_steps: int) -> None:
        """Rows are known to the trainer as group_attempt_row, and to the estimator by their group alone: give it the rest too."""
        fields = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
        failures = [str(extra["failed"]) for extra in fields["extra_fields"]]
        if all(failures):
            raise PalestraError(f"every rollout of step {global_steps - 1} failed; the first: {failures[0]}")
        labels = []
        for key, failure in zip(batch.keys, failures, strict=True):
            uid, session, _ = key.rsplit("_", 2)
            labels.append(attempt_label(uid, session, bool(failure)))
        named = tu.get_tensordict({"uid": np.array(labels, dtype=object)})
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=named)

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        ended = len(self.partitions[partition_id])
        if ended != self._ended:
            self._ended, self._since = ended, time.monotonic()
        elif time.monotonic() - self._since > self._patience:
            left = self.pending_keys[partition_id] | self.running_keys[partition_id]
            raise PalestraError(
                f"no rollout has ended for {self._patience:g} s, and {len(left)} groups are not complete: "
                "an agent-loop worker of verl's has died or hangs (backend.stall_seconds is how long to wait)"
            )
        last: float = super()._wait_for_next_poll(partition_id, last_debug_time)
        return last


class CommitCallback(CheckpointCallback):  # type: ignore[misc]  # verl has no types
    """Commits to the ledger what a checkpoint of verl's holds, once it is written."""

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, **_: Any) -> None:
        ray.get(ray.get_actor(RECORD).commit.remote(global_step, Path(checkpoint_dir).name))
