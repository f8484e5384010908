"""`palestra bench search`: code search on Django, side by side with ripgrep and universal-ctags."""

import random
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from palestra.bench.sources import DJANGO
from palestra.sources import fetch
from palestra.tools.code import CodeIndex
from palestra.tools.code.text import program

QUERIES = 2_000
PEER_QUERIES = 20
REPEATS = 3


def bench_search(console: Console) -> dict[str, Any]:
    root = fetch(DJANGO)
    with tempfile.TemporaryDirectory() as folder:
        figures = {"files": 0, **_cold(root, Path(folder)), **_questions(root, Path(folder) / "0")}
        figures |= _edited(root, Path(folder))
    figures["ripgrep"] = _ripgrep(root, figures.pop("names"))
    figures["ctags"] = _ctags(root)
    _show(console, figures)
    return figures


def _cold(root: Path, folder: Path) -> dict[str, Any]:
    """CPU seconds until a repository that was never seen can be asked, the writing of the cache included."""
    seconds = []
    for repeat in range(REPEATS):
        started = time.process_time()
        index = CodeIndex(root, cache=folder / str(repeat))
        seconds.append(time.process_time() - started)
        del index
    return {"cold_cpu_s": min(seconds), "cold_cpu_s_all": seconds}


def _questions(root: Path, cache: Path) -> dict[str, Any]:
    """Milliseconds of a question for a definition, each name drawn as often as it is defined: the first time, and again."""
    started = time.perf_counter()
    index = CodeIndex(root, cache=cache)
    opened = _ms(started)
    defined = [symbol.name for path in sorted(index.files.listing()) if path.endswith(".py") for symbol in index.outline(path)]
    names = list(dict.fromkeys(random.Random(0).sample(defined, QUERIES)))
    index = CodeIndex(root, cache=cache)
    figures: dict[str, Any] = {"files": len(index), "definitions": len(defined), "queries": len(names), "reopen_ms": opened}
    # Plain names are more work than qualified ones: they have more answers.
    plain = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    for label in ("first_touch", "warm"):
        figures |= _percentiles(label, _timed(index.symbol, [*names, *plain]))
    figures |= _percentiles("references", _timed(index.references, plain[:200]))
    return {**figures, "names": plain[:PEER_QUERIES]}


def _edited(root: Path, folder: Path) -> dict[str, float]:
    """Milliseconds of the first question after an edit, on a copy of a part of the repository."""
    copy = folder / "edited"
    shutil.copytree(root / "django", copy)
    index = CodeIndex(copy, cache=folder / "0")
    path = copy / "db" / "models" / "query.py"
    times = []
    for number in range(20):
        with path.open("a", encoding="utf-8") as file:
            file.write(f"\ndef added_{number}():\n    pass\n")
        started = time.perf_counter()
        assert index.symbol(f"added_{number}"), "an edit shows in the next answer"
        times.append(_ms(started))
    return {"after_edit_p50_ms": statistics.median(times)}


def _ripgrep(root: Path, names: Sequence[str]) -> dict[str, float]:
    """The same questions to ripgrep: lines that look like a definition. It has no index."""
    commands = [[program(), "-n", rf"^\s*(async\s+)?(def|class)\s+{name}\b", str(root)] for name in names]
    costs = [_child(command) for command in commands]
    return {"query_ms": statistics.median(wall for wall, _ in costs), "query_cpu_ms": statistics.median(cpu for _, cpu in costs)}


def _ctags(root: Path) -> dict[str, Any]:
    found = shutil.which("ctags-universal") or shutil.which("ctags")
    if found is None or "Universal Ctags" not in subprocess.run([found, "--version"], capture_output=True, text=True).stdout:
        return {"absent": "universal-ctags is not installed (Debian's package universal-ctags)"}
    command = [found, "-R", "--languages=Python,JavaScript", "--fields=+ne", "-f", "/dev/null", str(root)]
    return {"cold_cpu_s": min(_child(command)[1] for _ in range(REPEATS)) / 1e3}


def _child(command: Sequence[str]) -> tuple[float, float]:
    """Milliseconds and CPU milliseconds of a command."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    wall, after = _ms(started), resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e3


def _timed(question: Callable[[str], object], names: Iterable[str]) -> list[float]:
    times = []
    for name in names:
        started = time.perf_counter()
        question(name)
        times.append(_ms(started))
    return times


def _percentiles(label: str, times: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=100)
    return {f"{label}_p50_ms": cuts[49], f"{label}_p99_ms": cuts[98], f"{label}_max_ms": max(times)}


def _ms(started: float) -> float:
    return (time.perf_counter() - started) * 1e3


def _show(console: Console, figures: dict[str, Any]) -> None:
    console.print(f"{DJANGO.archive}: {figures['files']} source files, {figures['definitions']} definitions in Python")
    peer = figures["ctags"]
    ctags = peer.get("absent") or f"universal-ctags {peer['cold_cpu_s']:.2f} CPU-s"
    console.print(f"cold index: {figures['cold_cpu_s']:.2f} CPU-s; {ctags}")
    console.print(
        f"opened again from the cache: {figures['reopen_ms']:.0f} ms; after an edit: {figures['after_edit_p50_ms']:.1f} ms"
    )
    for label, title in (
        ("first_touch", "a definition, first time"),
        ("warm", "a definition, again"),
        ("references", "references"),
    ):
        middle, high, most = (figures[f"{label}_{which}_ms"] for which in ("p50", "p99", "max"))
        console.print(f"{title}: p50 {middle:.3f} ms, p99 {high:.2f} ms, at most {most:.1f} ms")
    console.print(
        f"ripgrep, a definition: {figures['ripgrep']['query_ms']:.0f} ms, {figures['ripgrep']['query_cpu_ms']:.0f} CPU-ms"
    )
