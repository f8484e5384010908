import asyncio
from collections.abc import Awaitable, Callable

import pytest

from palestra.lab import clock
from palestra.lab.ceiling import generation_seconds
from palestra.lab.cluster import Balance, Cluster, Elastic, Policy, Together, balance
from palestra.lab.workload import Workload


def play(workload: Workload, policy: Policy, script: Callable[[Cluster], Awaitable[None]]) -> None:
    async def main() -> None:
        await script(Cluster(workload.engine, workload.training.publish_seconds, policy, "shortest"))

    clock.run(main())


def now() -> float:
    return asyncio.get_running_loop().time()


async def live(cluster: Cluster, contexts: int) -> list[asyncio.Task[None]]:
    """So many contexts with a first call behind them, waiting for a tool until they are cancelled."""

    async def one(order: int) -> None:
        async with cluster.engine.context(order) as context:
            await context.call(3000, 10)
            await asyncio.sleep(1e6)

    tasks = [asyncio.create_task(one(order)) for order in range(contexts)]
    await asyncio.sleep(100)
    return tasks


async def end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_together_all_train_then_all_generate(w1: Workload) -> None:
    async def script(cluster: Cluster) -> None:
        tasks = await live(cluster, 4)
        started = now()
        async with asyncio.TaskGroup() as group:
            group.create_task(cluster.train(570.0))
            await asyncio.sleep(1.0)
            assert cluster.generating == 0
            assert cluster.engine.kv_used == 0
        assert now() - started == pytest.approx(570)
        await cluster.publish()
        assert now() - started == pytest.approx(600)
        assert cluster.generating == 8
        use = cluster.use()
        assert [use.training, use.publishing] == pytest.approx([8 * 570, 8 * 30])
        assert use.generating + use.idle == pytest.approx(8 * 100)
        await end(tasks)

    play(w1, Together(), script)


def test_work_is_done_first_come_first_served(w1: Workload) -> None:
    ends: list[float] = []

    async def script(cluster: Cluster) -> None:
        async def train(seconds: float) -> None:
            await cluster.train(seconds)
            ends.append(now())

        await asyncio.gather(train(10.0), train(1.0), train(5.0))
        assert ends == pytest.approx([10, 11, 16])

    play(w1, Together(), script)


def test_cancelled_training_gives_way_to_the_next(w1: Workload) -> None:
    async def script(cluster: Cluster) -> None:
        first, second = asyncio.create_task(cluster.train(50.0)), asyncio.create_task(cluster.train(5.0))
        await asyncio.sleep(10)
        first.cancel()
        await second
        assert now() == pytest.approx(15)
        assert not cluster.has_training

    play(w1, Together(), script)


def test_a_split_stays_and_loses_no_kv(w1: Workload) -> None:
    async def script(cluster: Cluster) -> None:
        cluster.to_come = 1
        assert cluster.engine.kv_tokens == 5 * 690_000
        tasks = await live(cluster, 60)
        used = cluster.engine.kv_used
        started = now()
        training = asyncio.create_task(cluster.train(30.0))
        await asyncio.sleep(10)
        decoded = cluster.engine.totals().decoded
        await cluster.publish()  # takes 30 s of those that generate
        assert cluster.engine.totals().decoded == decoded
        await training
        assert now() - started == pytest.approx(30 * 8 / 3)
        use = cluster.use()
        assert (use.training, use.publishing) == pytest.approx((30 * 8, 30 * 5))
        assert cluster.engine.kv_used == used
        assert cluster.generating == 5
        await end(tasks)

    play(w1, Balance(3, pile=8, few=2, begun=True), script)


def test_training_has_the_units_that_it_keeps_busy(w1: Workload) -> None:
    assert balance(w1, generation_seconds(w1, w1.draw(0, 0))) == Balance(2, pile=16, few=4)


def test_a_unit_joins_training_while_groups_pile_up(w1: Workload) -> None:
    async def script(cluster: Cluster) -> None:
        cluster.to_come = 1
        for backlog, generating in ((0, 8), (7, 8), (8, 5), (3, 5), (2, 6), (7, 6), (9, 5)):
            cluster.backlog = backlog
            cluster.review()
            assert cluster.generating == generating

    play(w1, Balance(2, pile=8, few=2), script)


def test_the_last_runs_have_all_units_until_they_need_no_more(w1: Workload) -> None:
    async def script(cluster: Cluster) -> None:
        cluster.to_come = 1
        tasks = await live(cluster, 100)
        training = asyncio.create_task(cluster.train(570.0))
        await asyncio.sleep(1)
        assert cluster.generating == 5
        cluster.to_come = 0
        cluster.review()
        assert cluster.generating == 8
        await end(tasks[:90])
        assert 0 < cluster.generating < 5
        await end(tasks[90:])
        assert cluster.generating == 0
        await training
        await cluster.publish()
        assert cluster.generating == 8

    play(w1, Balance(3, pile=8, few=2, begun=True), script)


def test_elastic_generation_keeps_what_it_needs(w1: Workload) -> None:
    async def script(cluster: Cluster) -> None:
        cluster.coming = 1
        tasks = await live(cluster, 100)
        training = asyncio.create_task(cluster.train(570.0))
        await asyncio.sleep(1)
        assert cluster.generating == 8  # somebody is still to come
        cluster.coming = 0
        cluster.review()
        assert cluster.generating == 4  # 26 ms a step instead of 21
        assert cluster.engine.kv_used <= 100 * 3010 / 2
        await end(tasks[:40])
        assert cluster.generating == 4  # three would do; one unit is not worth its KV
        await end(tasks[40:99])
        assert cluster.generating == 2
        await end(tasks[99:])
        assert cluster.generating == 0
        await training
        await cluster.publish()
        assert cluster.generating == 8

    play(w1, Elastic(slack=0.25), script)


def test_kv_can_survive_the_switch(w1: Workload) -> None:
    keeping = w1.model_copy(update={"engine": w1.engine.model_copy(update={"switch_keeps_kv": True})})

    async def script(cluster: Cluster) -> None:
        tasks = await live(cluster, 4)
        used = cluster.engine.kv_used
        await cluster.train(570.0)
        await cluster.publish()
        assert cluster.engine.kv_used == used
        await end(tasks)

    play(keeping, Together(), script)


def test_the_kv_of_a_unit_that_joins_training_can_survive_too(w1: Workload) -> None:
    keeping = w1.model_copy(update={"engine": w1.engine.model_copy(update={"switch_keeps_kv": True})})

    async def script(cluster: Cluster) -> None:
        cluster.to_come = 1
        tasks = await live(cluster, 60)
        used = cluster.engine.kv_used
        for backlog, generating in ((8, 5), (2, 6), (8, 5)):
            cluster.backlog = backlog
            cluster.review()
            assert cluster.generating == generating
            assert cluster.engine.kv_used == used
            assert cluster.engine.kv_tokens == 6 * 690_000, "two units always train, and have none"
        await end(tasks)

    play(keeping, Balance(2, pile=8, few=2, begun=True), script)
