"""Our agent as verl's agent loop: an attempt at a task on verl's servers, handed back as rows with reward, masks and logprobs.

It is registered by `agent_loop.yaml`. Everything else that verl has for tools, chat templates and rewards stays unused.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from palestra import dispatch, hints, sandboxes
from palestra.bridges.verl.desk import Desk
from palestra.bridges.verl.rows import Row, rows, versions
from palestra.bridges.verl.sampler import VerlSampler
from palestra.bridges.verl.scene import CONFIG, RECORD, Scene, open_scene
from palestra.errors import PalestraError, UsageError
from palestra.policy import TokenPolicy
from palestra.protocols import Policy, Sampling
from palestra.rollout import OpenPolicy, Rollout, describe, seed_of
from palestra.sandbox.opening import make_provider
from palestra.tools.mcp import open_tools
from palestra.trajectory import Key, Trajectory


class PalestraLoop(AgentLoopBase):  # type: ignore[misc]  # verl has no types
    def __init__(self, trainer_config: Any, server_manager: Any, **_: Any) -> None:
        # Not verl's own __init__: it builds a chat template's tokens, and ours come from the renderer.
        self._verl = trainer_config.config
        self._scene = open_scene(self._verl.data[CONFIG], self._verl.actor_rollout_ref.model.path)
        self._sampler = VerlSampler(server_manager)
        # The classic trainer does not say which evaluation an attempt is for, so there nothing can be recorded.
        self._record = ray.get_actor(RECORD) if self._verl.trainer.use_v1 else None

    async def run(self, sampling_params: dict[str, Any], **fields: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        key, version = _key(fields), int(fields.get("global_steps", 0))
        if self._record is None:
            return self._handed_back(await self._attempt(key), version)
        try:
            # What an earlier, interrupted run recorded is taken instead of being sampled again.
            trajectory: Trajectory | None = await self._record.recall.remote(key)
            if trajectory is None:
                trajectory = await self._attempt(key)
                await self._record.keep.remote(key, trajectory)
            return self._handed_back(trajectory, version)
        except Exception as error:
            # verl would log it and go on. What can go wrong in a rollout is in its trajectory, and not here.
            known = isinstance(error, PalestraError)
            await self._record.refuse.remote(error if known else PalestraError(f"{key}: {type(error).__name__}: {error}"))
            raise

    async def _attempt(self, key: Key) -> Trajectory:
        scene = self._scene
        sampling = replace(scene.sampling, temperature=0.0) if key.phase == "greedy" else scene.sampling
        seed = scene.config.run.seed
        hinted = hints.make(scene.config.hints, scene.limits.turns, scene.config.agent.context, scene.renderer)
        rollout = Rollout(
            scene.tasks[key.task_id],
            key,
            self._policies(sampling),
            scene.limits,
            seed_of(seed, key.phase, key.step, key.task_id, key.index),
            patience=scene.patience,
            expected_tokens=scene.config.agent.context,
            hints=hinted and hinted.for_group(seed, key),
            open_tools=partial(open_tools, scene.config.tools),
        )
        await _desk(scene, asyncio.get_running_loop()).through(rollout)
        return rollout.trajectory

    def _policies(self, sampling: Sampling) -> OpenPolicy:
        context = self._scene.config.agent.context

        @asynccontextmanager
        async def open_policy(seed: int) -> AsyncIterator[Policy]:
            async with self._sampler.session(seed, context) as session:
                yield TokenPolicy(session, self._scene.renderer, sampling, context)

        return open_policy

    def _handed_back(self, trajectory: Trajectory, version: int) -> AgentLoopOutput | list[AgentLoopOutput]:
        training = self._scene.config.training
        masked = training is not None and trajectory.stop in training.masked_stops
        made = rows(trajectory, masked, min(self._scene.renderer.stop_ids))
        outputs = [output(row, trajectory, version) for row in made]
        if self._verl.trainer.use_v1:
            return outputs
        if len(outputs) > 1:
            raise UsageError(
                f"task {trajectory.task_id!r} made {len(outputs)} segments, and verl's classic trainer takes one for each "
                "attempt; set verl's trainer.use_v1 = true"
            )
        return outputs[0]


def output(row: Row, trajectory: Trajectory, version: int) -> AgentLoopOutput:
    """A row as verl takes it. A failed attempt has to have a reward there; our estimator leaves it out of the baseline."""
    oldest, newest = versions(trajectory, version)
    took = {
        what: sum(end - start for name, start, end in trajectory.spans if name == what) for what in ("sample", "tool", "reward")
    }
    return AgentLoopOutput(
        prompt_ids=row.prompt,
        response_ids=row.response,
        response_mask=row.mask,
        response_logprobs=row.logprobs,
        reward_score=trajectory.reward or 0.0,
        num_turns=len(trajectory.turns),
        metrics=AgentLoopMetrics(generate_sequences=took["sample"], tool_calls=took["tool"], compute_score=took["reward"]),
        extra_fields={
            "min_global_steps": oldest,
            "max_global_steps": newest,
            "failed": describe(trajectory.failure) if trajectory.failure else "",
            "reward_extra_info": {},
        },
    )


def _key(fields: dict[str, Any]) -> Key:
    phase, step = fields["palestra_phase"], int(fields["palestra_step"])
    if phase != "train":
        step = int(fields.get("global_steps", 0))
    index = fields["session_id"] if "session_id" in fields else fields["priority"]  # the classic trainer numbers a whole batch
    return Key(phase, step, fields["palestra_task"], int(index))


@cache
def _desk(scene: Scene, loop: asyncio.AbstractEventLoop) -> Desk:
    return Desk(dispatch.make(scene.config.dispatch, None), sandboxes.provided(lambda: make_provider(scene.config.sandbox)))
