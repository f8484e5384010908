"""What every provider does alike. Attacks are in `test_escape.py`."""

import asyncio
import time
from pathlib import Path

import pytest

from palestra import sandboxes
from palestra.errors import ToolError, UsageError
from palestra.protocols import Sandboxes, Spec


async def test_a_command_runs_without_a_shell(provider: Sandboxes) -> None:
    async with provider.open() as sandbox:
        ran = await sandbox.run(["printf", "%s|", "$(id)", ";", "a b", "*"])
        assert (ran.code, ran.stdout.head, ran.timed_out) == (0, b"$(id)|;|a b|*|", False)


async def test_streams_and_code_are_kept_apart(provider: Sandboxes) -> None:
    async with provider.open() as sandbox:
        ran = await sandbox.run(["sh", "-c", "echo out; echo err >&2; exit 7"])
        assert (ran.code, ran.stdout.head, ran.stderr.head) == (7, b"out\n", b"err\n")


async def test_bytes_go_in_and_out_unchanged(provider: Sandboxes) -> None:
    every = bytes(range(256)) * 40
    async with provider.open() as sandbox:
        assert (await sandbox.run(["cat"], stdin=every)).stdout.head == every
        await sandbox.write(f"{sandbox.folder}/deep/er/file", every)
        assert await sandbox.read(f"{sandbox.folder}/deep/er/file") == every
        await sandbox.write(f"{sandbox.folder}/deep/er/file", b"short")
        assert await sandbox.read(f"{sandbox.folder}/deep/er/file") == b"short"


async def test_folder_and_environment(provider: Sandboxes) -> None:
    async with provider.open() as sandbox:
        await sandbox.write(f"{sandbox.folder}/sub/x", b"")
        ran = await sandbox.run(
            ["sh", "-c", "pwd; echo $GREETING"], folder=f"{sandbox.folder}/sub", environment={"GREETING": "hi"}
        )
        assert ran.stdout.head.decode() == f"{sandbox.folder}/sub\nhi\n"
        assert (await sandbox.run(["pwd"])).stdout.head.decode().strip() == sandbox.folder


async def test_long_output_keeps_its_ends(provider: Sandboxes) -> None:
    async with provider.open() as sandbox:
        ran = await sandbox.run(["seq", "1000000"], keep=1000)
        assert ran.stdout.head.startswith(b"1\n2\n3\n")
        assert ran.stdout.tail.endswith(b"999999\n1000000\n")
        assert (len(ran.stdout.head), len(ran.stdout.tail), ran.stdout.size) == (500, 500, 6_888_896)
        assert not ran.stdout.whole


async def test_a_signal_is_a_code(provider: Sandboxes) -> None:
    async with provider.open() as sandbox:
        assert (await sandbox.run(["sh", "-c", "kill -9 $$"])).code == 137


async def test_what_cannot_be_started(provider: Sandboxes) -> None:
    async with provider.open() as sandbox:
        missing = await sandbox.run(["no-such-program"])
        assert missing.code == 127
        assert b"no-such-program" in missing.stderr.head
        await sandbox.write(f"{sandbox.folder}/plain", b"no program")
        assert (await sandbox.run([f"{sandbox.folder}/plain"])).code == 126
        with pytest.raises(ToolError, match="cannot run in"):
            await sandbox.run(["true"], folder=f"{sandbox.folder}/nowhere")


async def test_time_is_over(provider: Sandboxes) -> None:
    async with provider.open() as sandbox:
        started = time.monotonic()
        ran = await sandbox.run(["sh", "-c", "echo begun; trap '' TERM; sleep 30; echo not"], seconds=0.3)
        assert (ran.timed_out, ran.code, ran.stdout.head) == (True, 137, b"begun\n")
        assert time.monotonic() - started < 25
        assert (await sandbox.run(["echo", "still here"])).stdout.head == b"still here\n"


async def test_a_cancelled_command_is_killed(provider: Sandboxes) -> None:
    async with provider.open() as sandbox:
        running = asyncio.create_task(sandbox.run(["sh", "-c", "sleep 1; touch late"]))
        await asyncio.sleep(0.3)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.sleep(1.2)
        with pytest.raises(ToolError):
            await sandbox.read(f"{sandbox.folder}/late")


async def test_a_background_process_is_not_waited_for(provider: Sandboxes) -> None:
    async with provider.open() as sandbox:
        started = time.monotonic()
        ran = await sandbox.run(["sh", "-c", "sleep 60 & echo done"])
        assert ran.stdout.head == b"done\n"
        assert time.monotonic() - started < 50


async def test_many_commands_at_once_get_their_own_answers(provider: Sandboxes) -> None:
    async with provider.open() as sandbox:
        flood = [sandbox.run(["sh", "-c", f"yes {number} | head -c 300000; exit {number}"]) for number in range(20)]
        for number, ran in enumerate(await asyncio.gather(*flood)):
            assert (ran.code, ran.stdout.size) == (number, 300_000)
            assert ran.stdout.head.startswith(f"{number}\n{number}\n".encode())


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([], "empty"),
        ([""], "empty"),
        (["echo", "a\0b"], "NUL"),
        (["echo", "x" * 10_000_000], "file"),
        (["echo", "\ud800"], "text"),
    ],
)
async def test_commands_that_cannot_be(provider: Sandboxes, command: list[str], said: str) -> None:
    async with provider.open() as sandbox:
        with pytest.raises(ToolError, match=said):
            await sandbox.run(command)
        assert (await sandbox.run(["true"])).code == 0


@pytest.mark.parametrize("path", ["relative", "", "/nul\0", "/" + "x" * 5000, "/\ud800"])
async def test_paths_that_cannot_be(provider: Sandboxes, path: str) -> None:
    async with provider.open() as sandbox:
        for attempt in (sandbox.read(path), sandbox.write(path, b""), sandbox.run(["true"], folder=path or "x")):
            with pytest.raises(ToolError):
                await attempt


async def test_what_is_no_file_is_not_read(provider: Sandboxes) -> None:
    async with provider.open() as sandbox:
        await sandbox.run(["sh", "-c", "mkfifo fifo; mkdir folder; truncate -s 900M large"])
        for name, said in (
            ("fifo", "regular"),
            ("folder", "directory|regular"),
            ("large", "943718400"),
            ("none", "No such file"),
        ):
            with pytest.raises(ToolError, match=said):
                await sandbox.read(f"{sandbox.folder}/{name}")
        with pytest.raises(ToolError):
            await sandbox.write(f"{sandbox.folder}/fifo", b"x")
        with pytest.raises(ToolError):
            await sandbox.write(f"{sandbox.folder}/folder", b"x")


async def test_sandboxes_share_nothing(provider: Sandboxes) -> None:
    async with provider.open() as one, provider.open() as other:
        await one.write(f"{one.folder}/mine", b"x")
        assert (await other.run(["ls"])).stdout.head == b""
    async with provider.open() as third:
        assert (await third.run(["ls"])).stdout.head == b""


async def test_a_snapshot_is_built_once_and_shared(provider: Sandboxes, tmp_path: Path) -> None:
    (tmp_path / "given").write_text("given\n")
    (tmp_path / "unwanted").write_text("x")
    spec = Spec({"repo": tmp_path}, [["sh", "-c", "echo made > made; rm repo/unwanted"]], name=str(tmp_path))
    times = 0

    async def setup(sandbox: sandboxes.Sandbox) -> None:
        nonlocal times
        times += 1
        await sandbox.write(f"{sandbox.folder}/written", b"written\n")

    assert await provider.snapshot(spec, setup) == await provider.snapshot(spec, setup)
    assert times == 1
    snapshot = await provider.snapshot(spec, setup)
    (tmp_path / "given").write_text("changed on the host\n")
    for _ in range(2):
        async with provider.open(snapshot) as sandbox:
            ran = await sandbox.run(
                ["sh", "-c", "cat made written repo/given; ls repo; echo more >> repo/given; rm -r repo made"]
            )
            assert (ran.code, ran.stdout.head.decode()) == (0, "made\nwritten\ngiven\ngiven\n"), ran.stderr.head


async def test_a_snapshot_upon_another_has_both(provider: Sandboxes, tmp_path: Path) -> None:
    name = str(tmp_path)
    base = await provider.snapshot(Spec(commands=[["sh", "-c", "echo one > one; echo old > both; touch gone"]], name=name))
    upon = await provider.snapshot(Spec(commands=[["sh", "-c", "cat one > two; echo new > both; rm gone"]], name=name, base=base))
    third = await provider.snapshot(Spec(commands=[["touch", "three"]], name=name, base=upon))
    assert await provider.snapshot(Spec(commands=[["touch", "three"]], name=name, base=base)) != third
    async with provider.open(third) as sandbox:
        assert (await sandbox.run(["sh", "-c", "cat one two both; ls"])).stdout.head == b"one\none\nnew\nboth\none\nthree\ntwo\n"
    async with provider.open(base) as sandbox:
        assert (await sandbox.run(["sh", "-c", "cat both; ls"])).stdout.head == b"old\nboth\ngone\none\n"


async def test_a_set_up_that_fails_leaves_no_snapshot(provider: Sandboxes) -> None:
    spec = Spec(commands=[["sh", "-c", "echo no luck >&2; exit 3"]])
    for _ in range(2):
        with pytest.raises(UsageError, match="ended with 3: no luck"):
            await provider.snapshot(spec)


async def test_tasks_find_the_provider(provider: Sandboxes) -> None:
    with pytest.raises(UsageError, match="provided"):
        sandboxes.open()
    async with sandboxes.provided(lambda: provider), asyncio.TaskGroup() as group:
        group.create_task(_greet())


async def _greet() -> None:
    snapshot = await sandboxes.snapshot(Spec(commands=[["touch", "here"]]))
    async with sandboxes.open(snapshot) as sandbox:
        assert (await sandbox.run(["ls"])).stdout.head == b"here\n"
