"""The warden's outer half in Python, for hosts without a compiler. It does what `warden/launch.c` does, where each step is
explained, with the same arguments. It is run as a script, and imports nothing of ours.
"""

import ctypes
import os
import signal
import struct
import sys
from typing import NoReturn

CONTROL, SELF, FILTER = 3, 4, 5
STAGE = "/tmp"
INNER_HALF = os.path.join(os.path.dirname(__file__), "slow_supervise.py")
NEWNS, NEWUSER = 0x00020000, 0x10000000
PRIVATE, NOSUID_NODEV = 0x4000 | (1 << 18), 2 | 4
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442
AT_FDCWD, EMPTY_PATH, CLONE_TREE, IDMAP = -100, 0x1000, 1, 0x100000

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    if result < 0:
        fail(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def fail(text: str) -> NoReturn:
    os.write(2, f"warden: {text}\n".encode())
    os._exit(125)


def put(file: str, text: str) -> None:
    fd = os.open(file, os.O_WRONLY)
    os.write(fd, text.encode())
    os.close(fd)


def mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    words = [word.encode() if word else None for word in (source, target, kind)]
    checked(libc.mount(*words, ctypes.c_ulong(flags), options.encode() or None), f"mount {target}")


def keep(fd: int, at: int) -> None:
    if fd != at:
        os.dup2(fd, at)
        os.close(fd)
    os.set_inheritable(at, True)


def id_map(plan: dict[str, str]) -> int:
    ready, gate = os.pipe()
    child = os.fork()
    if not child:
        checked(libc.unshare(NEWUSER), "id map")
        os.write(gate, b"x")
        signal.pause()
    os.read(ready, 1)
    for name in ("uid_map", "gid_map"):
        put(f"/proc/{child}/{name}", f"0 0 1\n{plan['from']} {plan['uid']} 1\n")
    fd = os.open(f"/proc/{child}/ns/user", os.O_RDONLY)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ready)
    os.close(gate)
    return fd


def clone_mount(path: str, users: int) -> int:
    fd = checked(libc.syscall(OPEN_TREE, AT_FDCWD, path.encode(), CLONE_TREE | os.O_CLOEXEC), path)
    if users >= 0:
        attributes = struct.pack("<QQQQ", IDMAP, 0, 0, users)
        checked(libc.syscall(MOUNT_SETATTR, fd, b"", EMPTY_PATH, attributes, len(attributes)), "id-mapped layer")
    return fd


def place(mounted: int, name: str) -> None:
    os.mkdir(name)
    checked(libc.syscall(MOVE_MOUNT, mounted, b"", AT_FDCWD, name.encode(), 4), name)
    os.close(mounted)


def stack_layers(plan: dict[str, str], layers: list[str]) -> None:
    users = id_map(plan) if plan.get("from", "0") != plan.get("uid", "0") else -1
    lower = [clone_mount(layer, users) for layer in layers]
    upper = clone_mount(plan["upper"], -1) if "upper" in plan else -1
    mount("tmpfs", STAGE, "tmpfs", NOSUID_NODEV, f"size={plan['size']},nr_inodes={plan['inodes']},mode=755")
    os.chdir(STAGE)
    for number, layer in enumerate(lower):
        place(layer, f"l{number}")
    if upper >= 0:
        place(upper, "d")
    else:
        for name, mode in (("d", 0o755), ("d/u", 0o555), ("d/w", 0o755)):
            os.mkdir(name, mode)
    os.close(os.open("empty", os.O_CREAT | os.O_WRONLY, 0o444))
    os.mkdir("root")
    names = ":".join(f"l{number}" for number in range(len(lower)))
    options = f"lowerdir={names},upperdir=d/u,workdir=d/w" + (",userxattr" if "user" in plan else "")
    mount("overlay", "root", "overlay", NOSUID_NODEV, options)


def launch(words: list[str]) -> NoReturn:
    cut = words.index("--")
    pairs = [word.partition("=")[::2] for word in words[:cut]]
    plan, command = dict(pairs), words[cut + 1 :]
    os.closerange(CONTROL + 1, os.sysconf("SC_OPEN_MAX"))
    for file in (value for key, value in pairs if key == "cgroup"):
        put(file, "0")
    if "user" not in plan:
        put("/proc/self/oom_score_adj", "500")
    keep(os.open(INNER_HALF, os.O_RDONLY), SELF)
    if "filter" in plan:
        keep(os.open(plan["filter"], os.O_RDONLY), FILTER)
    program = os.open(command[0], os.O_RDONLY)
    uid, gid = os.getuid(), os.getgid()
    checked(libc.unshare(NEWNS | (NEWUSER if "user" in plan else 0)), "unshare")
    if "user" in plan:
        put("/proc/self/setgroups", "deny")
        put("/proc/self/uid_map", f"0 {uid} 1")
        put("/proc/self/gid_map", f"0 {gid} 1")
    mount("", "/", "", PRIVATE, "")
    stack_layers(plan, [value for key, value in pairs if key == "layer"])
    os.chdir("/")
    if own := int(plan.get("uid", "0")):
        os.setgroups([])
        os.setresgid(own, own, own)
        os.setresuid(own, own, own)
    os.execve(program, command, dict(os.environ))


if __name__ == "__main__":
    try:
        launch(sys.argv[2:])
    except OSError as error:
        fail(str(error))
