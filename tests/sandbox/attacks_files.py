"""Attacks on the file system and on the file API."""

import asyncio
import os

import pytest
from sandbox.arena import Arena, attack

from palestra.errors import ToolError


@attack("hidden_host")
async def read_a_file_of_the_host(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        assert arena.secret not in await inside.sh(f"cat {arena.canary} /mnt{arena.canary}")


@attack("hidden_host")
async def read_private_files(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        assert (await inside.run("cat", "/etc/shadow")).code
        for path in ("/root/*", "/home/*/.ssh", "/boot/*", "/mnt/*", "/media/*", "/srv/*"):
            assert (await inside.run("sh", "-c", f"ls -d {path}")).code, path


@attack("clear_environment")
async def read_the_owners_environment(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        assert arena.secret not in await inside.sh("env; cat /proc/*/environ | tr '\\0' '\\n'")


@attack("read_only_system")
async def write_to_the_system(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        for path in ("/usr/x", "/usr/bin/x", "/etc/x", "/x", "/bin/x", "/lib/x", "/usr/local/lib/x", "/dev/x", "/proc/x"):
            assert (await inside.run("touch", path)).code, path
        assert " / /usr rw" not in await inside.sh("sed 's#/usr /usr#/ /usr#' /proc/self/mountinfo")


@attack("masked_proc")
async def read_the_kernels_secrets(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        for name in ("cmdline", "kallsyms", "kcore", "keys", "timer_list"):
            assert int(await inside.sh(f"head -c 64 /proc/{name} 2>/dev/null | wc -c")) == 0, name


@attack()
async def write_to_the_kernels_switches(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        for name in (
            "sys/kernel/core_pattern",
            "sys/kernel/hostname",
            "sys/vm/drop_caches",
            "sysrq-trigger",
            "sys/user/max_user_namespaces",
        ):
            assert (await inside.run("sh", "-c", f"echo 1 > /proc/{name}")).code, name


@attack()
async def look_for_sysfs_and_control_groups(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        assert (await inside.run("ls", "/sys/fs/cgroup")).code
        assert "cgroup" not in await inside.sh("cat /proc/self/mountinfo")


@attack()
async def learn_the_hosts_folders_from_mounts(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        mounts = await inside.sh("cat /proc/self/mountinfo /proc/self/mounts")
        for word in (str(arena.folder), str(arena.folder.parent), ".cache", "snapshot-", "skeleton-"):
            assert word not in mounts, word


@attack("hidden_host")
async def read_through_links(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        await inside.sh(f"ln -s {arena.canary} link; ln -s / top; ln -s /mnt{arena.canary} mounted")
        paths = ["/work/link", f"/work/top{arena.canary}", "/work/mounted", f"/work/../../../..{arena.canary}"]
        paths += [f"/proc/{which}/root{arena.canary}" for which in ("1", "self", "thread-self")]
        for path in paths:
            try:
                data = await inside.api.read(path)
            except ToolError:
                continue
            assert arena.secret.encode() not in data, path


@attack()
async def write_through_links(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        await inside.sh(f"ln -s {arena.canary} link")
        for path in ("/work/link", f"/proc/self/root{arena.canary}", f"/work/../..{arena.canary}"):
            try:
                await inside.api.write(path, b"overwritten")
            except ToolError:
                continue
    assert arena.canary.read_text() == arena.secret


@attack()
async def race_the_file_api_with_links(arena: Arena) -> None:
    """A path that is now a file and now a link, while it is written and read."""
    script = f"while :; do ln -sfn {arena.canary} x; rm -f x; echo mine > x; done"
    async with arena.sandbox() as inside:
        racing = asyncio.create_task(inside.sh(script, seconds=1.0))
        while not racing.done():
            try:
                await inside.api.write("/work/x", b"overwritten")
                assert arena.secret.encode() not in await inside.api.read("/work/x")
            except ToolError:
                await asyncio.sleep(0)
    assert arena.canary.read_text() == arena.secret


@attack()
async def make_the_file_api_hang(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        await inside.sh("mkfifo fifo; ln -s /dev/zero zero; ln -s loop loop; mkdir folder")
        for name in ("fifo", "zero", "loop", "folder"):
            for work in (inside.api.read(f"/work/{name}"), inside.api.write(f"/work/{name}", b"x")):
                with pytest.raises(ToolError):
                    await asyncio.wait_for(work, 10)
        for path in ("/dev/tty", "/dev/random", "/proc/1/mem", "/proc/kmsg", "/proc/self/pagemap", "/proc/self/fd/3"):
            with pytest.raises(ToolError):
                await asyncio.wait_for(inside.api.read(path), 10)


@attack()
async def hold_a_lease_on_a_file(arena: Arena) -> None:
    script = "fd = os.open('held', os.O_RDWR | os.O_CREAT)\nimport fcntl, signal\nsignal.signal(signal.SIGIO, signal.SIG_IGN)\n"
    script += "fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)\nopen('ready', 'w')\ntime.sleep(20)"
    async with arena.sandbox() as inside:
        holding = asyncio.create_task(inside.python(script, seconds=8))
        await inside.sh("while ! [ -e ready ]; do sleep 0.05; done")
        with pytest.raises(ToolError, match="unavailable"):
            await asyncio.wait_for(inside.api.read("/work/held"), 4)
        assert await asyncio.wait_for(inside.alive(), 4)
        holding.cancel()


@attack()
async def read_more_than_there_is_memory(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        await inside.sh("truncate -s 900G sparse; truncate -s 900M smaller")
        for name in ("sparse", "smaller"):
            with pytest.raises(ToolError, match="the most"):
                await inside.api.read(f"/work/{name}")


@attack()
async def leave_something_for_the_next(arena: Arena) -> None:
    places = "/work /tmp /var/tmp /dev/shm /home/agent /run /opt"
    async with arena.sandbox() as one, arena.sandbox() as other:
        await one.sh(f"for f in {places}; do echo {arena.secret} > $f/left; done")
        assert arena.secret not in await other.sh(f"cat $(printf '%s/left ' {places})")
    async with arena.sandbox() as third:
        assert arena.secret not in await third.sh(f"cat $(printf '%s/left ' {places})")


@attack()
async def delete_everything(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        await inside.sh("rm -rf --no-preserve-root / 2>/dev/null; chmod -R 777 / 2>/dev/null; mv /usr /x")
    async with arena.sandbox() as inside:
        assert await inside.alive()
        assert "agent" in await inside.sh("cat /etc/passwd; ls /home")
    assert arena.canary.exists()


@attack()
async def make_or_find_devices(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        said = await inside.python(
            "print(*[tried(lambda: os.mknod('d', kind | 0o666, os.makedev(8, 0))) for kind in (0o60000, 0o20000)])"
        )
        assert set(said.split()) <= {"EPERM", "EACCES"}
        assert (
            await inside.sh("ls -d /dev/vda /dev/sda /dev/mem /dev/kmsg /dev/kvm /dev/fuse /dev/net /dev/mapper 2>/dev/null")
            == ""
        )


@attack()
async def become_another_user(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        assert await inside.sh("cp /usr/bin/id .; chmod 6755 id; ./id -u; id -u") == "1000\n1000\n"
        said = await inside.python(
            "print(*[tried(f) for f in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]))])"
        )
        assert set(said.split()) <= {"EINVAL", "EPERM"}
        status = await inside.sh("cat /proc/self/status")
        assert "NoNewPrivs:\t1" in status
        assert [line for line in status.splitlines() if line.startswith("Cap") and int(line.split()[1], 16)] == []


@attack("disk_limit")
async def fill_the_disk(arena: Arena) -> None:
    amount = arena.limits.disk // 2**20 + 16
    async with arena.sandbox() as inside:
        said = await inside.sh(f"dd if=/dev/zero of=big bs=1M count={amount}")
        assert "No space left" in said, said
        assert await inside.sh("rm big; echo small > small; cat small") == "small\n"
        assert "No space left" in await inside.sh("dd if=/dev/zero of=/dev/shm/big bs=1M count=32")


@attack("disk_limit")
async def fill_the_inodes(arena: Arena) -> None:
    script = f"print(tried(lambda: [os.close(os.open(str(i), os.O_CREAT)) for i in range({arena.limits.inodes + 100})]))"
    async with arena.sandbox() as inside:
        assert await inside.python(script) == "ENOSPC"


@attack()
async def overwrite_the_supervisors_program(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        said = await inside.python("print(*[tried(lambda: os.open('/proc/1/exe', flags)) for flags in (os.O_RDONLY, os.O_RDWR)])")
        assert said == "EACCES EACCES"


@attack()
async def spell_odd_paths(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        for name in ("a\nb", "sp ace", "ünï", "-rf", "$(id)", "\x1b[31m", "x" * 255):
            await inside.api.write(f"/work/{name}", name.encode())
            assert await inside.api.read(f"/work/{name}") == name.encode()
        with pytest.raises(ToolError):
            await inside.api.write(f"/work/{'x' * 256}", b"")
        assert os.listdir(arena.folder) == ["canary"]
