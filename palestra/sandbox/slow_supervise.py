"""The warden's inner half in Python, for hosts without a compiler. It does what `warden/supervise.c` does, where each step is
explained, with the same messages. It is run as a script inside the sandbox, and imports nothing of ours.
"""

import array
import ctypes
import errno
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
from typing import NoReturn

CONTROL = 3
RUN, KILL, READ, WRITE = 1, 2, 3, 4
READY, FAILED, EXITED, OPENED = 1, 2, 3, 4
AT_FOLDER, AT_PROGRAM, AT_FORK = 1, 2, 3
PASSES_MOST, PASS_SECONDS = 40, 0.005
NOT_DUMPABLE = (4, 0, 0, 0, 0)
"""prctl's PR_SET_DUMPABLE."""


class Command:
    def __init__(self, number: int, pid: int, started: int, due: float) -> None:
        self.number, self.pid, self.started, self.due = number, pid, started, due
        self.passes = 0
        self.status: int | None = None


def look(pid: int) -> tuple[int, int] | None:
    """Parent and start time of a process that has not ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if not fields or fields[0] in b"ZX" else (int(fields[1]), int(fields[19]))


class Supervisor:
    def __init__(self, limits: list[int]) -> None:
        self.processes, self.data, self.files = limits
        self.line = socket.socket(fileno=CONTROL)
        self.line.setblocking(True)
        self.live: dict[int, Command] = {}

    def say(self, kind: int, number: int, value: int = 0, more: int = 0, fd: int = -1) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
        try:
            self.line.sendmsg([struct.pack("<IIiI", kind, number, value, more)], rights)
        except OSError:
            os._exit(1)

    def become(self, number: int, words: list[bytes], argc: int, fds: list[int]) -> NoReturn:
        for name in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(name, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.setsid()
        for at, fd in enumerate(fds):
            os.dup2(fd, at, inheritable=True)
        limits = {resource.RLIMIT_CORE: 1, resource.RLIMIT_NOFILE: self.files}
        limits |= {
            kind: value for kind, value in ((resource.RLIMIT_DATA, self.data), (resource.RLIMIT_NPROC, self.processes)) if value
        }
        try:
            os.chdir(words[0])
        except OSError as error:
            self.say(FAILED, number, error.errno or 0, AT_FOLDER)
            os._exit(126)
        for kind, value in limits.items():
            resource.setrlimit(kind, (value, value))
        environment = dict(word.partition(b"=")[::2] for word in words[1 + argc :])
        try:
            os.execvpe(words[1], words[1 : 1 + argc], environment)
        except OSError as error:
            self.say(FAILED, number, error.errno or 0, AT_PROGRAM)
        os._exit(127)

    def run(self, number: int, milliseconds: int, argc: int, words: list[bytes], fds: list[int]) -> None:
        started = int(time.clock_gettime(time.CLOCK_BOOTTIME) * 100)
        try:
            pid = self.fork_even_if_crowded()
        except OSError as error:
            self.say(FAILED, number, error.errno or 0, AT_FORK)
            return
        if not pid:
            self.become(number, words, argc, fds)
        self.live[pid] = Command(number, pid, started, time.monotonic() + milliseconds / 1000)

    def fork_even_if_crowded(self) -> int:
        for _ in range(100):
            try:
                return os.fork()
            except BlockingIOError:
                if self.live:
                    break
                os.kill(-1, signal.SIGKILL)
                self.reap()
                time.sleep(0.005)
        return os.fork()

    def open_file(self, path: bytes, writing: bool) -> int:
        if writing:
            parts = path.split(b"/")
            for count in range(2, len(parts)):
                try:
                    os.mkdir(b"/".join(parts[:count]), 0o755)
                except OSError as error:
                    if error.errno not in (errno.EEXIST, errno.EROFS, errno.EACCES):
                        raise
        fd = os.open(path, (os.O_WRONLY | os.O_CREAT if writing else os.O_RDONLY) | os.O_NONBLOCK | os.O_NOCTTY, 0o644)
        mode = os.fstat(fd)
        wrong = errno.EISDIR if stat.S_ISDIR(mode.st_mode) else 0 if stat.S_ISREG(mode.st_mode) else errno.ENOTSUP
        if not wrong and mode.st_dev == os.stat("/proc").st_dev:
            wrong = errno.ENOTSUP
        if wrong:
            os.close(fd)
            raise OSError(wrong, "")
        return fd

    def started_by(self, command: Command, pid: int) -> bool:
        own, at = 0, pid
        while at > 1:
            if at == command.pid:
                return True
            seen = look(at)
            if seen is None:
                return own >= command.started
            own = own or seen[1]
            if seen[0] == 1:
                return at not in self.live and min(own, seen[1]) >= command.started
            at = seen[0]
        return False

    def kill_all(self, command: Command) -> int:
        found = 0
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) > 1 and look(int(name)) and self.started_by(command, int(name)):
                found += 1
                try:
                    os.kill(int(name), signal.SIGKILL)
                except ProcessLookupError:
                    continue
        return found

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if (command := self.live.get(pid)) is not None:
                command.status = status
                if not command.passes:
                    self.say(EXITED, command.number, status)
                    del self.live[pid]

    def tend(self) -> float | None:
        for command in list(self.live.values()):
            if command.due > time.monotonic() or command.pid not in self.live:
                continue
            command.passes += 1
            found = self.kill_all(command)
            if command.passes > PASSES_MOST:
                os.kill(-1, signal.SIGKILL)
            self.reap()
            if not found and command.status is not None:
                self.say(EXITED, command.number, command.status, 1)
                del self.live[command.pid]
            command.due = time.monotonic() + PASS_SECONDS
        return min((max(0.0, command.due - time.monotonic()) for command in self.live.values()), default=None)

    def hear(self) -> None:
        data, beside, _, _ = self.line.recvmsg(262_144, socket.CMSG_LEN(12), socket.MSG_CMSG_CLOEXEC)
        fds = list(array.array("i", b"".join(rights for _, _, rights in beside)))
        if not data:
            os._exit(0)
        ask, number, milliseconds, argc, _ = struct.unpack_from("<5I", data)
        words = data[20:].split(b"\0")[:-1]
        if ask == RUN:
            self.run(number, milliseconds, argc, words, fds)
        elif ask == KILL:
            for command in self.live.values():
                if command.number == number:
                    command.due = 0.0
        elif ask in (READ, WRITE):
            try:
                fds.append(self.open_file(words[0], ask == WRITE))
                self.say(OPENED, number, fd=fds[0])
            except OSError as error:
                self.say(OPENED, number, error.errno or 0)
        for fd in fds:
            os.close(fd)

    def serve(self) -> NoReturn:
        woken, waking = os.pipe()
        for fd in (woken, waking):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(waking)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(CONTROL, select.POLLIN)
        poll.register(woken, select.POLLIN)
        self.say(READY, 0)
        while True:
            wait = self.tend()
            ready = dict(poll.poll(None if wait is None else wait * 1000))
            if woken in ready:
                os.read(woken, 4096)
                self.reap()
            if CONTROL in ready:
                self.hear()


def supervise(words: list[str]) -> NoReturn:
    ctypes.CDLL(None).prctl(*NOT_DUMPABLE)
    os.set_inheritable(CONTROL, False)
    null = os.open(os.devnull, os.O_RDWR)
    for at in range(3):
        os.dup2(null, at)
    os.closerange(CONTROL + 1, 16)
    os.umask(0o022)
    Supervisor([int(word) for word in words]).serve()


if __name__ == "__main__":
    supervise(sys.argv[2:])
