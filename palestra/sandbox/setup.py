"""The commands of a spec, run in the sandbox that becomes its snapshot."""

from palestra.errors import UsageError
from palestra.protocols import Sandbox, Spec


async def run_commands(sandbox: Sandbox, spec: Spec) -> None:
    for command in spec.commands:
        ran = await sandbox.run(command, seconds=spec.seconds)
        if ran.code:
            said = (ran.stderr.head + ran.stderr.tail)[-2000:].decode(errors="replace")
            how = "took too long" if ran.timed_out else f"ended with {ran.code}"
            raise UsageError(f"the set-up command {list(command)} of a sandbox {how}: {said}")
