"""The seccomp filter as a classic BPF program, written out here so that no library is needed.

What could reach beyond the sandbox, or into kernel code that commands do not need, is refused with EPERM; system calls that
this file does not know, and so has not judged, with ENOSYS. Calls by another architecture's table kill the process.
"""

import errno
import platform
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from palestra.errors import InfrastructureError

ALLOW = 0x7FFF0000
KILL = 0x80000000
EPERM = 0x00050000 | errno.EPERM
ENOSYS = 0x00050000 | errno.ENOSYS
EAFNOSUPPORT = 0x00050000 | errno.EAFNOSUPPORT

NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET (the bit of NEWTIME means something else to clone)."""
FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6. AF_VSOCK, for one, knows no network namespaces."""
NETLINK = 16
ROUTE = 0
TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX type into the terminal of whoever started us."""

# Number on x86_64, and on aarch64 (None: not there).
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
    "memfd_secret": (447, 447),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "set_mempolicy_home_node": (450, 450),
    "personality": (135, 92),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "_sysctl": (156, None),
    "create_module": (174, None),
    "get_kernel_syms": (177, None),
    "query_module": (178, None),
}


@dataclass(frozen=True)
class Machine:
    audit: int
    column: int
    newest: int
    """The highest number that was judged when this was written (Linux 6.12)."""
    clone: int
    clone3: int
    socket: int
    socketpair: int
    ioctl: int


MACHINES = {
    "x86_64": Machine(0xC000003E, 0, 462, 56, 435, 41, 53, 16),
    "aarch64": Machine(0xC00000B7, 1, 462, 220, 435, 198, 199, 29),
}

Instruction = tuple[int, int, int, int]
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST, SECOND, THIRD = 0, 4, 16, 24, 32


def _refuse_if(test: int, value: int, verdict: int) -> list[Instruction]:
    return [(test, 0, 1, value), (RETURN, 0, 0, verdict)]


def _for_call(number: int, body: Sequence[Instruction]) -> list[Instruction]:
    """The body runs for this call only, and ends by itself."""
    return [(EQUAL, 0, len(body), number), *body]


def _arguments_checked(machine: Machine) -> Iterable[Instruction]:
    # glibc takes ENOSYS as a reason to use clone, whose flags can be read here.
    yield from _refuse_if(EQUAL, machine.clone3, ENOSYS)
    yield from _for_call(machine.clone, [(LOAD, 0, 0, FIRST), *_refuse_if(ANY_BIT, NAMESPACES, EPERM), (RETURN, 0, 0, ALLOW)])
    terminal = [line for request in TERMINAL_INPUT for line in _refuse_if(EQUAL, request, EPERM)]
    yield from _for_call(machine.ioctl, [(LOAD, 0, 0, SECOND), *terminal, (RETURN, 0, 0, ALLOW)])
    families: list[Instruction] = [(LOAD, 0, 0, FIRST)]
    for family in FAMILIES:
        families += _refuse_if(EQUAL, family, ALLOW)
    families += [(EQUAL, 0, 3, NETLINK), (LOAD, 0, 0, THIRD), *_refuse_if(EQUAL, ROUTE, ALLOW), (RETURN, 0, 0, EAFNOSUPPORT)]
    for number in (machine.socket, machine.socketpair):
        yield from _for_call(number, families)


def program(name: str | None = None) -> bytes:
    """The filter for this machine, as bwrap takes it."""
    name = name or platform.machine()
    machine = MACHINES.get(name)
    if machine is None:
        raise InfrastructureError(f"no seccomp filter for {name}; known: {', '.join(MACHINES)}")
    lines: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, machine.audit),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
    ]
    lines += _refuse_if(AT_LEAST, machine.newest + 1, ENOSYS)  # the x32 table lies above, too
    for numbers in REFUSED.values():
        number = numbers[machine.column]
        if number is not None:
            lines += _refuse_if(EQUAL, number, EPERM)
    lines += [*_arguments_checked(machine), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("<HBBI", *line) for line in lines)
