"""The schedules that others have published, as they describe them and with their signature, to compare with: they take their
own kind of trajectories by instance and number, and call and await the three methods whose names they are given.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

Settings = Mapping[str, int]
Trajectories = Mapping[Any, Mapping[int, Any]]


class Schedule(Protocol):
    async def __call__(self, cfg: Settings, trajectories: Trajectories, init_fn: str, run_fn: str, eval_fn: str) -> None: ...


async def batch(cfg: Settings, trajectories: Trajectories, init_fn: str, run_fn: str, eval_fn: str) -> None:
    """Everything at once."""
    stages = (init_fn, run_fn, eval_fn)
    await asyncio.gather(*(_through(each, stages) for group in trajectories.values() for each in group.values()))


async def bounded(cfg: Settings, trajectories: Trajectories, init_fn: str, run_fn: str, eval_fn: str) -> None:
    """So many slots, each held from init to reward; one instance after the other."""
    slots = asyncio.Semaphore(cfg["max_parallel_agents"])

    async def in_a_slot(trajectory: Any) -> None:
        async with slots:
            await _through(trajectory, (init_fn, run_fn, eval_fn))

    await asyncio.gather(*(in_a_slot(each) for group in trajectories.values() for each in group.values()))


async def _through(trajectory: Any, stages: tuple[str, ...]) -> None:
    for stage in stages:
        await getattr(trajectory, stage)()


async def pipeline(cfg: Settings, trajectories: Trajectories, init_fn: str, run_fn: str, eval_fn: str) -> None:
    """Each stage has its own workers and an unbounded queue before it; first every instance's sample 0, then every sample 1, …"""
    queues: list[asyncio.Queue[Any]] = [asyncio.Queue() for _ in range(3)]
    for number in range(cfg["num_trajectories"]):
        for group in trajectories.values():
            queues[0].put_nowait(group[number])
    agents = cfg["max_parallel_agents"]
    workers = (agents, agents, cfg.get("max_eval_parallel_agents", agents))
    stages = []
    for at, (method, many) in enumerate(zip((init_fn, run_fn, eval_fn), workers, strict=True)):
        hand_on = queues[at + 1].put_nowait if at < 2 else None
        stages.append([asyncio.create_task(_worker(queues[at], method, hand_on)) for _ in range(many)])
    for queue, tasks in zip(queues, stages, strict=True):
        await queue.join()
        for task in tasks:
            task.cancel()


async def _worker(queue: asyncio.Queue[Any], method: str, hand_on: Callable[[Any], None] | None) -> None:
    while True:
        trajectory = await queue.get()
        stage: Callable[[], Awaitable[None]] = getattr(trajectory, method)
        await stage()
        if hand_on is not None:
            hand_on(trajectory)
        queue.task_done()
