"""SkyRL's trainers, sync and fully async, with what Palestra needs to hear and to say: which groups a step took, when a
checkpoint is written, when to stop, and evaluation on held-out tasks. The training loops are SkyRL's own."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import ray
import torch
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.trainer_utils import cleanup_old_checkpoints

from palestra.bridges.skyrl_train.account import Account

Evaluate = Callable[[int], Awaitable[dict[str, float]]]
"""Evaluates after so many steps, and says how it went."""


class Stopped(Exception):
    """The run was asked to stop, and all it did is saved."""


class Complete(Exception):
    """The checkpoint that a run goes on from has all its steps behind it."""


class Driven:
    """What both trainers have of ours; it stands before SkyRL's class."""

    account: Account
    evaluate: Evaluate
    resumed: Callable[[int, Path | None], None]
    stopping: Callable[[], bool]
    loop: asyncio.AbstractEventLoop
    connects_late = False
    """Whether it connects to the engines only after loading a checkpoint."""
    last_file = "trainer_state.pt"
    """The file of a checkpoint that is written last."""

    cfg: Any
    dispatch: Any
    global_step: int
    init_weight_sync_state: Callable[[], None]

    async def train(self) -> None:
        self.loop = asyncio.get_running_loop()
        try:
            await super().train()  # type: ignore[misc]
        except Complete:  # SkyRL would train one step more
            if self.connects_late:
                self.init_weight_sync_state()
            await self.dispatch.save_weights_for_sampler()
            await self.evaluate(self.cfg.trainer.max_training_steps)

    async def eval(self, vllm_metrics_scraper: object = None) -> dict[str, float]:
        return await self.evaluate(self.global_step)

    def convert_to_training_input(self, generator_output: Any, uids: list[str]) -> Any:
        self.account.took(self.global_step - 1, uids)
        return super().convert_to_training_input(generator_output, uids)  # type: ignore[misc]

    def _skip_policy_forward(self, training_input: Any) -> bool:
        """Our losses read the sampler's logprobs only."""
        ours: bool = self.cfg.trainer.algorithm.policy_loss_type.startswith("palestra_")
        return ours or super()._skip_policy_forward(training_input)  # type: ignore[misc]

    def _normalize_advantages(self, data: Any, *boundaries: Any) -> Any:
        """SkyRL's means over sequences count those that are not trained on; ours do not."""
        data = super()._normalize_advantages(data, *boundaries)  # type: ignore[misc]
        if self.cfg.trainer.algorithm.loss_reduction != "token_mean":
            rows, trained = len(data["loss_mask"]), int(data["loss_mask"].any(dim=-1).sum())
            data["advantages"] = data["advantages"] * (rows / max(1, trained))
        return data

    def train_critic_and_policy(self, data: Any) -> Any:
        if self.stopping():
            self.cfg.trainer.ckpt_interval = 1  # this step is saved, and is the last one
        return super().train_critic_and_policy(data)  # type: ignore[misc]

    def save_checkpoints(self) -> str:
        folder = Path(self.cfg.trainer.ckpt_path) / f"global_step_{self.global_step}"
        if not self.account.has_news:  # at the end SkyRL saves once more, under a number that no step has
            return str(folder)
        self.account.write(folder)
        super().save_checkpoints()  # type: ignore[misc]
        self._on_loop(self.account.commit, folder.name)
        self._clear_away()
        if self.stopping():
            raise Stopped
        return str(folder)

    def load_checkpoints(self) -> Any:
        go_back_to_complete(Path(self.cfg.trainer.ckpt_path), self.last_file)
        loaded = super().load_checkpoints()  # type: ignore[misc]
        done, folder = loaded[0], loaded[1]
        self.resumed(done, None if folder is None else Path(folder))
        if done >= self.cfg.trainer.max_training_steps:
            raise Complete
        return loaded

    def _on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        """The ledger belongs to one thread; the fully async trainer saves in another."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run_coroutine_threadsafe(_call(function, *arguments), self.loop).result()
        else:
            function(*arguments)

    def _cleanup_old_checkpoints(self) -> None:
        """SkyRL would do it before the new one is complete."""

    def _clear_away(self) -> None:
        if ray.is_initialized():
            super()._cleanup_old_checkpoints()  # type: ignore[misc]
        else:  # on one machine without GPUs, where nothing is remote
            cleanup_old_checkpoints(self.cfg.trainer.ckpt_path, self.cfg.trainer.max_ckpts_to_keep)


async def _call(function: Callable[..., None], *arguments: Any) -> None:
    function(*arguments)


class SyncTrainer(Driven, RayPPOTrainer):
    """Strictly on-policy: a step's rollouts, then its update."""


class AsyncTrainer(Driven, FullyAsyncRayPPOTrainer):
    """Rollouts run ahead of training, as far as the staleness allows."""

    connects_late = True
    last_file = "fully_async_state.pt"


def go_back_to_complete(checkpoints: Path, last_file: str) -> None:
    """SkyRL empties the file that names the latest checkpoint before it writes it, and the fully async trainer writes it before
    the checkpoint's last file. Where a run was killed in between, name the latest that is complete; the step that is repeated
    writes the other anew."""
    latest = checkpoints / "latest_ckpt_global_step.txt"
    if not latest.exists():
        return
    step = latest.read_text().strip()
    newest = checkpoints / f"global_step_{step}"
    if step and (not newest.is_dir() or _is_whole(newest / last_file)):
        return
    complete = [folder for folder in checkpoints.glob("global_step_*") if _is_whole(folder / last_file)]
    if complete:
        latest.write_text(str(max(int(folder.name.removeprefix("global_step_")) for folder in complete)))
    else:
        latest.unlink()


def _is_whole(file: Path) -> bool:
    try:
        torch.load(file, map_location="cpu", weights_only=False)
    except (OSError, EOFError, RuntimeError, UnpicklingError):  # as no file or half of one looks to it
        return False
    return True
