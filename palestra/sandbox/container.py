"""Sandboxes as containers of docker or podman, from any image: slower to start, for tasks that come as images. The supervisor
is the same as elsewhere; it is shown to the container read-only, and calls a socket of ours from there.
"""

import asyncio
import hashlib
import io
import itertools
import json
import os
import shutil
import socket
import tarfile
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

from palestra.errors import InfrastructureError, UsageError
from palestra.protocols import Sandbox, Snapshot, Spec
from palestra.sandbox import seccomp
from palestra.sandbox.cgroup import owner_lives, owner_name
from palestra.sandbox.layers import AGENT, HOME, WORK, cache_folder, hash_tree
from palestra.sandbox.limits import Limits
from palestra.sandbox.native import warden
from palestra.sandbox.setup import run_commands
from palestra.sandbox.started import Started, start_calling
from palestra.sandbox.supervised import SupervisedSandbox

TOOLS, CALL = "/run/palestra", "/run/palestra-call"
NEEDED = ("SETUID", "SETGID", "CHOWN", "DAC_OVERRIDE", "SETPCAP")
"""Capabilities with which the supervisor makes folders and gives up root; then they are gone."""
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": HOME,
    "USER": "agent",
    "LANG": "C.UTF-8",
}
ENGINES = ("podman", "docker")
REPOSITORY = "localhost/palestra-snapshot"
NOTHING = Snapshot()


class Container:
    """`engine` is the program with its own options, `options` are for its `run`."""

    def __init__(self, image: str, limits: Limits | None = None, engine: Sequence[str] = (), options: Sequence[str] = ()) -> None:
        self.limits = limits or Limits()
        self._image = image
        self._engine = _found(engine)
        self._options = options
        self._tools = _tools(cache_folder())
        self._calls = Path(tempfile.mkdtemp(prefix=f"{owner_name()}-"))
        self._names = itertools.count()

    async def snapshot(self, spec: Spec, setup: Callable[[Sandbox], Awaitable[object]] | None = None) -> Snapshot:
        key = await asyncio.to_thread(self._key, spec)
        tag = f"{REPOSITORY}:{key}"
        if await _succeeds([*self._engine, "image", "inspect", tag]):
            return Snapshot(tag)
        name = f"{owner_name()}-{next(self._names)}"
        started = await self._start(spec.base.key or self._image, replace(self.limits, network=spec.network), ["--name", name])
        try:
            sandbox = SupervisedSandbox(started.line, WORK, ENVIRONMENT)
            for inside, folder in spec.folders.items():
                await _copy_in(sandbox, folder, inside)
            await run_commands(sandbox, spec)
            if setup is not None:
                await setup(sandbox)
            await _said([*self._engine, "commit", name, tag])
        finally:
            await asyncio.shield(started.end())
        return Snapshot(tag)

    @asynccontextmanager
    async def open(self, snapshot: Snapshot = NOTHING) -> AsyncIterator[Sandbox]:
        started = await self._start(snapshot.key or self._image, self.limits, [])
        try:
            yield SupervisedSandbox(started.line, WORK, ENVIRONMENT)
        finally:
            await asyncio.shield(started.end())

    async def close(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._calls, ignore_errors=True)

    async def _start(self, image: str, limits: Limits, more: Sequence[str]) -> Started:
        folder = self._calls / str(next(self._names))
        folder.mkdir()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            try:
                server.bind(str(folder / "socket"))
                server.listen(1)
                return await start_calling(
                    [*self._engine, "run", *self._words(folder, limits), *more, *self._inside(image)], server
                )
            finally:
                shutil.rmtree(folder)  # nobody else shall call

    def _words(self, folder: Path, limits: Limits) -> list[str]:
        words = ["--rm", "--pull=never", "--hostname", "sandbox", "--user", "0:0", "--workdir", "/", "--ipc", "private"]
        words += ["--network", "host" if limits.network else "none", "--label", f"palestra={owner_name()}"]
        words += ["--cap-drop", "ALL", *itertools.chain(*(("--cap-add", name) for name in NEEDED))]
        words += ["--security-opt", "no-new-privileges", "--pids-limit", str(limits.processes + 8)]
        words += ["--memory", str(limits.memory), "--memory-swap", str(limits.memory), "--cpus", str(limits.cpus)]
        words += ["--volume", f"{self._tools}:{TOOLS}:ro", "--volume", f"{folder}:{CALL}:ro", "--shm-size", "16m"]
        return [*words, *self._options, "--entrypoint", f"{TOOLS}/warden"]

    def _inside(self, image: str) -> list[str]:
        limits = [str(self.limits.processes), "0", str(self.limits.open_files)]
        return [image, "join", f"{CALL}/socket", f"{TOOLS}/filter", str(AGENT), *limits]

    def _key(self, spec: Spec) -> str:
        plain = [spec.base.key or self._image, spec.name, [list(command) for command in spec.commands], spec.network]
        digest = hashlib.sha256(json.dumps(plain).encode())
        for inside, folder in sorted(spec.folders.items()):
            digest.update(f"{inside}\0".encode())
            hash_tree(folder, digest)
        return digest.hexdigest()[:24]


async def sweep(snapshots: bool) -> list[str]:
    """Remove containers whose owner is gone, and on request all snapshots, from each engine that answers. Containers go by
    themselves, unless their engine was killed too."""
    gone: list[str] = []
    for engine in filter(None, map(shutil.which, ENGINES)):
        with suppress(InfrastructureError):  # docker without its daemon, for one
            listed = await _said(
                [engine, "ps", "--all", "--filter", "label=palestra", "--format", '{{.ID}} {{.Label "palestra"}}']
            )
            doomed = [line.split()[0] for line in listed.splitlines() if not owner_lives(line.split()[1])]
            if doomed:
                await _said([engine, "rm", "--force", *doomed])
            images = (await _said([engine, "images", "--quiet", REPOSITORY])).split() if snapshots else []
            if images:
                await _said([engine, "rmi", "--force", *images])
            gone += doomed + images
    return gone


def _found(engine: Sequence[str]) -> list[str]:
    names = engine[:1] or ENGINES
    for program in filter(None, map(shutil.which, names)):
        return [program, *engine[1:]]
    raise UsageError(f"no {' or '.join(names)} is installed, which sandbox.kind = 'container' needs")


def _tools(cache: Path) -> Path:
    """The supervisor and its filter, in a folder to be shown to containers."""
    made = warden(cache)
    if not made.compiled:
        raise UsageError("sandbox.kind = 'container' needs a C compiler, for the supervisor; install gcc")
    folder = cache / f"tools-{Path(made.outside[0]).name}"
    if not folder.exists():
        partial = Path(tempfile.mkdtemp(dir=cache, prefix=f"{owner_name()}-"))
        shutil.copy2(made.outside[0], partial / "warden")
        (partial / "filter").write_bytes(seccomp.program())
        partial.chmod(0o755)
        partial.rename(folder)
    return folder


async def _copy_in(sandbox: Sandbox, folder: Path, inside: str) -> None:
    """As one archive, so that modes and links come along; it then belongs to the agent."""
    target = os.path.join(WORK, inside)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        await asyncio.to_thread(tar.add, folder, ".")
    ran = await sandbox.run(["sh", "-c", 'mkdir -p "$0" && tar -xof - -C "$0"', target], stdin=archive.getvalue(), seconds=600)
    if ran.code:
        raise InfrastructureError(f"{folder} could not be copied to {target}: {ran.stderr.head.decode(errors='replace')}")


async def _run(command: Sequence[str]) -> tuple[int, str, str]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe)
    stdout, stderr = await process.communicate()
    return process.returncode or 0, stdout.decode(errors="replace"), stderr.decode(errors="replace")


async def _succeeds(command: Sequence[str]) -> bool:
    return (await _run(command))[0] == 0


async def _said(command: Sequence[str]) -> str:
    code, stdout, stderr = await _run(command)
    if code:
        raise InfrastructureError(f"{' '.join(command[:3])} ended with {code}: {stderr.strip()}")
    return stdout
