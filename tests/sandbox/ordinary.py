"""Running a Python program as an ordinary user from root's tests, also where Python or the project lies in a folder that only
root may enter: there a mount namespace of its own shows just these."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

UID = 54321
ROOT = Path(__file__).parents[2]
NEEDED = [Path(place).resolve() for place in dict.fromkeys((sys.base_prefix, sys.prefix, ROOT))]


def run_as_ordinary_user(arguments: list[str], home: Path, seconds: float) -> "subprocess.CompletedProcess[str]":
    """`home` belongs to the user, and everyone may reach it."""
    steps = []
    for number, place in enumerate(NEEDED):
        steps += [f"mkdir {home}/{number}", f"mount --bind {shlex.quote(str(place))} {home}/{number}"]
    for closed in dict.fromkeys(filter(None, map(_closed, NEEDED))):
        steps.append(f"mount -t tmpfs -o mode=755 none {shlex.quote(str(closed))}")
    for number, place in enumerate(NEEDED):
        if _closed(place):
            steps += [f"mkdir -p {shlex.quote(str(place))}", f"mount --bind {home}/{number} {shlex.quote(str(place))}"]
    steps.append(f"exec setpriv --reuid {UID} --regid {UID} --clear-groups {shlex.quote(sys.executable)} {shlex.join(arguments)}")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(home), "TMPDIR": str(home)}
    command = ["unshare", "-m", "sh", "-ec", "\n".join(steps)]
    return subprocess.run(command, env=environment, cwd=home, check=False, capture_output=True, text=True, timeout=seconds)


def _closed(place: Path) -> Path | None:
    """The folder on the way there that others may not enter."""
    return next((folder for folder in reversed(place.parents) if not folder.stat().st_mode & 0o001), None)
