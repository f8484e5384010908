"""Where the units' time went, on an engine small enough to count by hand."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict

import pytest

from palestra.lab import clock, workload
from palestra.lab.account import UnitTime, account
from palestra.lab.cluster import Cluster, Together

WHOLE_CHUNKS = workload.Engine(
    units=1,
    step_seconds=1.0,
    decode_seconds=0.5,
    prefill_rate=512.0,
    prefill_chunk=512,
    kv_tokens=10_000,
    switch_keeps_kv=False,
    whole_chunks=True,
)


def unit_seconds(
    script: Callable[[Cluster], Awaitable[None]], generation_seconds: float, spec: workload.Engine = WHOLE_CHUNKS
) -> dict[str, float]:
    """The parts in seconds, in the life of a cluster of one unit."""

    async def main() -> tuple[UnitTime, float]:
        cluster = Cluster(spec, 30.0, Together(), "arrived")
        await script(cluster)
        return account(cluster, generation_seconds), asyncio.get_running_loop().time()

    parts, seconds = clock.run(main())
    return {name: share * seconds for name, share in asdict(parts).items()}


def test_every_second_has_one_name() -> None:
    async def script(cluster: Cluster) -> None:
        async with cluster.engine.context(0) as context:
            await context.call(768, 10)  # two chunks for one and a half, and KV for all ten tokens at once
            await asyncio.sleep(7)
        await cluster.train(50.0)
        await cluster.publish()
        await asyncio.sleep(3)

    full_kv = 10 * (768 + 10 / 2) / 10_000
    parts = unit_seconds(script, generation_seconds=full_kv + 10 * 0.5 + 1.5)
    assert parts == pytest.approx(
        {
            "generation": full_kv + 10 * 0.5 + 1.5,
            "training": 50,
            "publishing": 30,
            "chunks": 0.5,
            "again": 0,
            "reserved": (2 * 778 + 10 * 10 / 2) / 10_000,
            "waiting": 0,  # nobody else could have used what it held
            "empty": 0,
            "idle": 3,
            "start": 7 + 12 * (1 - 778 / 10_000),
        }
    )


def test_a_part_of_a_chunk_takes_a_part_of_a_step() -> None:
    async def script(cluster: Cluster) -> None:
        async with cluster.engine.context(0) as context:
            await context.call(768, 10)

    generation = 10 * (768 + 10 / 2) / 10_000 + 10 * 0.5 + 1.5
    parts = unit_seconds(script, generation, WHOLE_CHUNKS.model_copy(update={"whole_chunks": False}))
    assert parts["chunks"] == pytest.approx(0)
    assert parts["reserved"] == pytest.approx((1.5 * 778 + 10 * 10 / 2) / 10_000)


def test_who_waits_for_a_tool_costs_the_others_steps() -> None:
    async def script(cluster: Cluster) -> None:
        async def waiting() -> None:
            async with cluster.engine.context(0) as context:
                await context.call(512, 1)
                await asyncio.sleep(100)

        async with asyncio.TaskGroup() as group:
            group.create_task(waiting())
            await asyncio.sleep(50)
            async with cluster.engine.context(1) as context:
                await context.call(512, 4)

    parts = unit_seconds(script, generation_seconds=0.0)
    assert parts["waiting"] == pytest.approx((1 + 4) * 513 / 10_000)  # a step to prefill, and four to decode


def test_what_lost_its_kv_is_prefilled_again() -> None:
    async def script(cluster: Cluster) -> None:
        async with cluster.engine.context(0) as context:
            await context.call(1024, 1)
            await cluster.train(10.0)  # takes the unit, and its KV
            await cluster.publish()
            await context.call(511, 1)

    assert unit_seconds(script, generation_seconds=0.0)["again"] == pytest.approx(1025 / 512)
