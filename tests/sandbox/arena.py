"""Where attacks take place: a provider, a canary on the host, and what an attacker inside can call. An attack is a function
that asserts that it was held; it names the protections without which it would not have been.
"""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from palestra.protocols import Ran, Sandbox, Sandboxes
from palestra.sandbox.limits import Limits

PRELUDE = """
import ctypes, errno, os, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(number, *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    return errno.errorcode[ctypes.get_errno()] if result < 0 else "WORKED"
def tried(work):
    try:
        work()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "WORKED"
"""


@dataclass
class Arena:
    provider: Sandboxes
    limits: Limits
    folder: Path
    """On the host, with the canary in it."""
    controllers: frozenset[str]
    """What control groups limit here."""
    secret: str = field(default_factory=lambda: f"canary-{secrets.token_hex(8)}")

    @property
    def canary(self) -> Path:
        return self.folder / "canary"

    @contextmanager
    def set(self) -> Iterator["Arena"]:
        """Canaries on the host: a file, a variable."""
        self.canary.write_text(self.secret)
        os.environ["PALESTRA_CANARY"] = self.secret
        try:
            yield self
        finally:
            del os.environ["PALESTRA_CANARY"]

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator["Attacker"]:
        async with self.provider.open() as sandbox:
            yield Attacker(sandbox)


@dataclass
class Attacker:
    """Somebody inside."""

    api: Sandbox

    async def run(self, *command: str, seconds: float = 30.0) -> Ran:
        return await self.api.run(command, seconds=seconds)

    async def sh(self, script: str, seconds: float = 30.0) -> str:
        """What a shell script writes, to either stream."""
        return text(await self.run("sh", "-c", script, seconds=seconds))

    async def python(self, script: str, seconds: float = 30.0) -> str:
        return text(await self.run("python3", "-c", PRELUDE + script, seconds=seconds)).strip()

    async def alive(self) -> bool:
        return await self.sh("echo alive") == "alive\n"


def text(ran: Ran) -> str:
    return b"".join((ran.stdout.head, ran.stdout.tail, ran.stderr.head, ran.stderr.tail)).decode(errors="replace")


def on_the_host(marker: str) -> list[int]:
    """Processes of the host with these words in their command line, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if marker.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


async def until(held: Callable[[], bool], seconds: float = 10.0) -> bool:
    for _ in range(int(seconds * 50)):
        if held():
            return True
        await asyncio.sleep(0.02)
    return held()


Attack = Callable[[Arena], Awaitable[None]]
ATTACKS: dict[str, Attack] = {}
NOTICES: dict[str, tuple[str, ...]] = {}


def attack(*notices: str) -> Callable[[Attack], Attack]:
    """Register an attack, with the protections whose absence it notices."""

    def register(work: Attack) -> Attack:
        name = getattr(work, "__name__", "")
        assert name not in ATTACKS
        ATTACKS[name], NOTICES[name] = work, notices
        return work

    return register
