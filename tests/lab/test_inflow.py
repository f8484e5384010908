import pytest

from palestra.lab.inflow import FASTEST, LATE, SLOWEST, Inflow

KV, UNDER_WAY = 1000, 200


def newcomers(inflow: Inflow, seconds: int, wanted: int, ended: int, used: int = KV) -> int:
    """How many come, if one does whenever it may. Contexts hold 10 tokens for 100 steps on average; steps take 0.1 s."""
    came = 0
    for _ in range(seconds):
        assert inflow.elapse(1.0, 10.0, used)
        inflow.review(KV, wanted, UNDER_WAY, ended)
        while inflow.due:
            inflow.came()
            came += 1
    return came


def after(ended: int) -> Inflow:
    """So many contexts came to their end before."""
    inflow = Inflow()
    inflow.elapse(1000.0, ended * 100 * 10 / KV, KV)
    inflow.start()
    return inflow


def test_they_come_as_fast_as_full_kv_brings_contexts_to_their_end() -> None:
    # 1000 tokens for 10 steps a second are 10 contexts a second; the 10,000 that ended make the pace nearly constant.
    assert newcomers(after(10_000), 20, wanted=1050, ended=10_000) == pytest.approx(200, abs=5)
    assert newcomers(after(10_000), 20, wanted=1050, used=KV // 2, ended=10_000) == pytest.approx(200, abs=5)


@pytest.mark.parametrize(("wanted", "pace"), [(2000, SLOWEST), (500, FASTEST)])
def test_a_surplus_is_corrected_slowly_and_not_beyond_its_limits(wanted: int, pace: float) -> None:
    inflow = after(1_000_000)
    assert newcomers(inflow, 20, wanted, ended=1_000_000) == pytest.approx(200, rel=0.05)
    newcomers(inflow, 2000, wanted, ended=1_000_000)
    assert newcomers(inflow, 20, wanted, ended=1_000_000) == pytest.approx(200 * pace, rel=0.03)


def test_who_is_late_comes_faster_and_no_more_than_some_are_owed() -> None:
    inflow = after(100_000)
    for _ in range(100):
        inflow.elapse(1.0, 10.0, KV)
        inflow.review(KV, 1050, UNDER_WAY, 100_000)
    first = [newcomers(inflow, 1, 1050, ended=100_000) for _ in range(30)]
    assert max(first[1:]) <= 14
    assert sum(first) == pytest.approx(LATE * UNDER_WAY + 29 * 10, abs=5)  # those of the first second are among the owed


def test_who_came_early_is_made_up_for() -> None:
    inflow = after(100_000)
    for _ in range(26):
        inflow.came()
    assert newcomers(inflow, 2, 1050, ended=100_000) == 0
    assert newcomers(inflow, 8, 1050, ended=100_000) == pytest.approx(100 - 26, abs=3)
