"""The command line's `palestra sandbox` verbs: try one by hand, examine the host, clear up after a crash."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from palestra import interrupts
from palestra.errors import UsageError
from palestra.protocols import Sandbox, Spec
from palestra.sandbox import cgroup, container, doctor
from palestra.sandbox.bubblewrap import Bubblewrap
from palestra.sandbox.layers import Layers, cache_folder
from palestra.sandbox.limits import Limits

MARKS = {"ok": "[green]ok     [/]", "weaker": "[yellow]weaker [/]", "missing": "[red]missing[/]"}


def run(command: Sequence[str], network: bool, folder: Path | None, seconds: float) -> int:
    """Run a command in a new sandbox, and show what it wrote. The folder, if given, is copied to the working folder."""
    if not command:
        raise UsageError("palestra sandbox run needs a command, such as: palestra sandbox run -- ls -la /")
    stdin = b"" if sys.stdin.isatty() else sys.stdin.buffer.read()  # before anything is open: it may take for ever
    return interrupts.run(_run(command, stdin, network, folder, seconds))


async def _run(command: Sequence[str], stdin: bytes, network: bool, folder: Path | None, seconds: float) -> int:
    provider = Bubblewrap(Limits(network=network))
    try:
        snapshot = await provider.snapshot(Spec({".": folder} if folder else {}))
        async with provider.open(snapshot) as sandbox:
            return await _shown(sandbox, command, stdin, seconds)
    finally:
        await provider.close()


async def _shown(sandbox: Sandbox, command: Sequence[str], stdin: bytes, seconds: float) -> int:
    ran = await sandbox.run(command, stdin=stdin, seconds=seconds, keep=2**24)
    for stream, output in ((sys.stdout.buffer, ran.stdout), (sys.stderr.buffer, ran.stderr)):
        stream.write(output.head + output.tail)
        stream.flush()
    if ran.timed_out:
        sys.stderr.write(f"palestra: stopped after {seconds:g} s\n")
    return ran.code


async def examine(console: Console) -> int:
    """0 when sandboxes work here, though perhaps weaker than elsewhere."""
    missing = False
    async for finding in doctor.examine():
        missing |= finding.state == "missing"
        console.print(f"{MARKS[finding.state]} {finding.about}: ", end="")
        console.print(finding.text, markup=False)
    return 1 if missing else 0


async def sweep(console: Console, snapshots: bool) -> int:
    """Remove what crashed processes left; on request all snapshots too, when nothing uses them."""
    gone = [*cgroup.sweep(), *Layers(cache_folder(), Path("/"), 0).sweep(snapshots), *await container.sweep(snapshots)]
    for path in gone:
        console.print(str(path), markup=False)
    console.print(f"{len(gone)} removed")
    return 0
