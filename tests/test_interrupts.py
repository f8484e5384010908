"""Whoever insists on a stop, everything is closed first, wherever the signal arrives. Each test stops a process of its own."""

import signal
import subprocess
import sys

import pytest

from palestra import interrupts

STOPPED = """
import asyncio, os, signal, sys, time
from palestra import interrupts
from palestra.errors import Terminated

async def hold(what):
    print("open", what)
    try:
        await asyncio.sleep(100)
    finally:
        await asyncio.sleep(0.1)
        print("closed", what)

async def signals():
    await asyncio.sleep(0.1)
    for name in sys.argv[1:]:  # nothing is awaited: they arrive while this task runs
        os.kill(os.getpid(), signal.Signals[name])
        time.sleep(0.01)
    await asyncio.sleep(100)

async def work():
    async with asyncio.TaskGroup() as nested:
        nested.create_task(hold("one"))
        async with asyncio.TaskGroup() as inner:
            inner.create_task(hold("two"))
            inner.create_task(signals())
            await hold("three")

with interrupts.drained() as stopping:
    try:
        interrupts.run(work())
    except KeyboardInterrupt as error:
        print(type(error).__name__, stopping())
"""


@pytest.mark.parametrize(
    ("signals", "ended", "said"),
    [
        (["SIGTERM"], "Terminated", []),
        (["SIGINT", "SIGINT"], "KeyboardInterrupt", ["stopping:"]),
        (["SIGINT", "SIGTERM"], "Terminated", ["stopping:"]),
        (["SIGTERM", "SIGINT", "SIGINT"], "Terminated", ["closing"] * 2),
        (["SIGINT", "SIGINT", "SIGTERM", "SIGINT"], "KeyboardInterrupt", ["stopping:", "closing", "closing"]),
    ],
    ids=lambda words: "-".join(words) if isinstance(words, list) else words,
)
def test_all_is_closed_wherever_the_signal_arrives(signals: list[str], ended: str, said: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", STOPPED, *signals], capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    assert sorted(lines[:-1]) == sorted(f"{state} {what}" for state in ("open", "closed") for what in ("one", "two", "three"))
    assert lines[-1] == f"{ended} {signals[0] == 'SIGINT'}"
    assert [line.split()[0] for line in done.stderr.splitlines() if line] == said


BLOCKED = """
import os, signal, sys, time
from palestra import interrupts
from palestra.errors import Terminated

before = signal.getsignal(signal.SIGTERM)
with interrupts.handled():
    try:
        os.kill(os.getpid(), signal.Signals[sys.argv[1]])
        time.sleep(100)
    except KeyboardInterrupt as error:
        print(type(error).__name__)
assert signal.getsignal(signal.SIGTERM) is before
"""


@pytest.mark.parametrize(("name", "ended"), [("SIGTERM", "Terminated"), ("SIGINT", "KeyboardInterrupt")])
def test_without_an_event_loop_the_first_signal_ends_what_runs(name: str, ended: str) -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED, name], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ended


ASIDE = """
import asyncio, os, signal, sys, threading, time
from palestra import interrupts, verbs

async def work():
    try:
        await asyncio.sleep(100)
    finally:
        await asyncio.sleep(0.1)
        print("closed")

def begin():
    time.sleep(float(sys.argv[1]))  # such as Ray's start
    interrupts.run(work())

def insist():
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGTERM)

async def notebook():
    with interrupts.drained():
        verbs._aside(begin)

threading.Thread(target=insist).start()
try:
    asyncio.run(notebook())
except KeyboardInterrupt as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("begins_after", [0, 1])
def test_where_a_loop_runs_already_the_work_beside_it_is_cancelled(begins_after: float) -> None:
    """Also where the stop came before its own loop."""
    command = [sys.executable, "-c", ASIDE, str(begins_after)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["closed", "Terminated"]


FORKED = """
import asyncio, multiprocessing, time
from palestra import interrupts

async def work():
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
    child.start()
    await asyncio.sleep(0.2)
    child.terminate()
    child.join(30)
    print(child.exitcode)
    child.kill()

with interrupts.handled():
    interrupts.run(work())
"""


def test_a_forked_process_ends_as_it_would_without_us() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout.strip(), done.stderr) == (str(-signal.SIGTERM), "")


def test_a_process_that_was_not_asked_to_stop_keeps_its_handlers() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts.handled(), interrupts.drained() as stopping:
        assert not stopping()
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
