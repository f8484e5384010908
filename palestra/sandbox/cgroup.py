"""Limits by control groups, version 1 and 2, where this process may make groups. Below its own, so that what it is
allowed itself is never exceeded."""

import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from palestra.sandbox.limits import ALL, Limits, Protections

CONTROLLERS = ("memory", "pids", "cpu")
PERIOD = 100_000
OWNER = re.compile(r"palestra-(\d+)-(\d+)")


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One tree of groups: where it is mounted, and the group that we are in."""

    version: int
    mount: Path
    own: Path


@dataclass(frozen=True, slots=True)
class Group:
    """The groups of one sandbox, one in each hierarchy."""

    folders: tuple[Path, ...]
    controllers: frozenset[str]

    @property
    def joins(self) -> list[Path]:
        """Files into which a process writes 0 to be in."""
        return [folder / "cgroup.procs" for folder in self.folders]

    def remove(self) -> bool:
        """Whether they are gone. They go only when empty."""
        return all([_remove(folder) for folder in self.folders])


def owner_name() -> str:
    return f"palestra-{os.getpid()}-{start_time(os.getpid())}"


def start_time(pid: int) -> int | None:
    """When a process started, in ticks since boot; None when there is none of this number."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def owner_lives(name: str) -> bool:
    """Whether the process that made a group or folder of this name is still there. Other names are nobody's to remove."""
    found = OWNER.match(name)
    return not found or start_time(int(found[1])) == int(found[2])


def hierarchies() -> dict[str, Hierarchy]:
    """The hierarchy of each controller that there is."""
    mounts: dict[str, tuple[Path, str]] = {}
    for line in _lines("/proc/self/mountinfo"):
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        root, place = fields.split()[3:5]
        for name in ("",) if kind == "cgroup2" else options.split(",") if kind == "cgroup" else ():
            mounts.setdefault(name, (Path(place), root))
    found = {}
    for line in _lines("/proc/self/cgroup"):
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            if name not in mounts:
                continue
            point, root = mounts[name]
            below = os.path.relpath(path, root)
            own = point if below.startswith("..") else point / below  # a container may not show where we are
            if name:
                found[name] = Hierarchy(1, point, own)
            else:
                for controller in _words(own / "cgroup.controllers"):
                    found.setdefault(controller, Hierarchy(2, point, own))
    return {name: found[name] for name in CONTROLLERS if name in found}


class Cgroups:
    """Makes the groups of sandboxes."""

    def __init__(self, known: Mapping[str, Hierarchy] | None = None) -> None:
        self._parents: dict[str, tuple[int, Path]] = {}
        for controller, hierarchy in (hierarchies() if known is None else known).items():
            with suppress(OSError):
                self._parents[controller] = (hierarchy.version, _parent(controller, hierarchy))

    @property
    def controllers(self) -> frozenset[str]:
        return frozenset(self._parents)

    def make(self, name: str, limits: Limits, protections: Protections = ALL) -> Group:
        folders: list[Path] = []
        for controller, (version, parent) in self._parents.items():
            folder = parent / name
            if folder not in folders:
                folder.mkdir()
                folders.append(folder)
            for file, value in _settings(controller, version, limits, protections):
                with suppress(FileNotFoundError):  # without swap accounting there is no file for it
                    (folder / file).write_text(value, encoding="ascii")
        return Group(tuple(folders), self.controllers)

    def close(self) -> None:
        for _, parent in self._parents.values():
            _remove(parent)


def _parent(controller: str, hierarchy: Hierarchy) -> Path:
    if hierarchy.version == 2:
        (hierarchy.own / "cgroup.subtree_control").write_text(f"+{controller}", encoding="ascii")
    parent = hierarchy.own / owner_name()
    parent.mkdir(exist_ok=True)
    if hierarchy.version == 2:
        (parent / "cgroup.subtree_control").write_text(f"+{controller}", encoding="ascii")
    return parent


def _settings(controller: str, version: int, limits: Limits, protections: Protections) -> Iterator[tuple[str, str]]:
    if controller == "memory" and protections.memory_limit:
        # Swap too: version 1 counts both together, and only after the memory is limited.
        yield ("memory.limit_in_bytes", "memory.max")[version - 1], str(limits.memory)
        yield ("memory.memsw.limit_in_bytes", "memory.swap.max")[version - 1], (str(limits.memory), "0")[version - 1]
    elif controller == "pids" and protections.process_limit:
        yield "pids.max", str(limits.processes + 8)  # so that the supervisor can always start a command
    elif controller == "cpu" and protections.cpu_limit:
        quota = max(1000, round(limits.cpus * PERIOD))
        if version == 2:
            yield "cpu.max", f"{quota} {PERIOD}"
        else:
            yield "cpu.cfs_period_us", str(PERIOD)
            yield "cpu.cfs_quota_us", str(quota)


def abandoned() -> list[Path]:
    """Groups whose owner is gone, wherever they are."""
    mounts = {hierarchy.mount for hierarchy in hierarchies().values()}
    found = [Path(folder) for mount in mounts for folder, _, _ in os.walk(mount) if not owner_lives(os.path.basename(folder))]
    return sorted(found)


def sweep() -> list[Path]:
    """Remove what dead owners left, and end what still runs there; what was removed."""
    gone = []
    for owner in abandoned():
        for group in (path for path in owner.iterdir() if path.is_dir()):
            for _ in range(100):
                for pid in _words(group / "cgroup.procs"):
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(int(pid), signal.SIGKILL)
                if _remove(group):
                    break
                time.sleep(0.01)
        if _remove(owner):
            gone.append(owner)
    return gone


def _remove(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines()


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []
