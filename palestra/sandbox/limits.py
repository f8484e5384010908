"""What a sandbox may use, and what is kept from it. Protections are switched off only by tests, to see who notices."""

from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one sandbox, all its processes together. What it writes is kept in memory, and counts there too."""

    memory: int = 1024 * MIB
    disk: int = 512 * MIB
    inodes: int = 65_536
    processes: int = 256
    cpus: float = 1.0
    open_files: int = 1024
    """Of one process."""
    network: bool = False
    """Whether it shares the host's network. Nothing is filtered then."""


@dataclass(frozen=True, slots=True)
class Protections:
    """Each is on. A test takes one away, and some attack must succeed."""

    seccomp: bool = True
    network_namespace: bool = True
    ipc_namespace: bool = True
    clear_environment: bool = True
    own_uid: bool = True
    read_only_system: bool = True
    hidden_host: bool = True
    """Nothing of the host but its system folders is to be seen."""
    masked_proc: bool = True
    disk_limit: bool = True
    process_limit: bool = True
    memory_limit: bool = True
    cpu_limit: bool = True


ALL = Protections()
