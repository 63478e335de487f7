"""The system call filter of the sandbox, as bytes of classic BPF.

Namespaces and limits isolate a program. The filter denies system calls that hold memory which no limit counts (System V
shared memory, memory files), that lead around a network namespace (vsock and other rare socket families), or that a
program under test does not need and kernels have had bugs in. A denied call fails with EPERM; a call made for another
architecture ends the process.
"""

import platform
import struct

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW, _DENY, _KILL = 0x7FFF0000, 0x00050000 | 1, 0x80000000
_X32 = 0x40000000
_FAMILIES = (1, 2, 10)  # unix, inet, inet6: all of them inside the private network namespace

_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SOCKETS = {"x86_64": (41, 53), "aarch64": (198, 199)}
"""Numbers of `socket` and `socketpair`."""
_OLD_CALLS = {
    "shmget": (29, 194), "shmat": (30, 196), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "memfd_create": (319, 279), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "swapon": (167, 224), "swapoff": (168, 225),
    "reboot": (169, 142), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "syslog": (103, 116), "acct": (163, 89),
    "quotactl": (179, 60), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
}  # fmt: skip
"""Denied calls that were numbered before architectures agreed: (x86_64, aarch64)."""
_NEW_CALLS = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 447)
"""Denied calls with one number everywhere: io_uring_*, open_tree … fspick, pidfd_getfd, mount_setattr, memfd_secret."""


def is_supported(machine: str | None = None) -> bool:
    """Return whether there is a filter for this processor."""
    return (machine or platform.machine()) in _ARCHES


def make_filter(machine: str | None = None) -> bytes:
    """Return the filter for this processor, as `bwrap --seccomp` reads it."""
    machine = machine or platform.machine()
    column = tuple(_ARCHES).index(machine)
    code = [
        _instruction(_LOAD, _ARCH_AT),
        _instruction(_EQUAL, _ARCHES[machine], 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER_AT),
    ]
    if machine == "x86_64":
        code += [_instruction(_AT_LEAST, _X32, 0, 1), _instruction(_RETURN, _KILL)]
    for number in (*(pair[column] for pair in _OLD_CALLS.values()), *_NEW_CALLS):
        code += [_instruction(_EQUAL, number, 0, 1), _instruction(_RETURN, _DENY)]
    first, second = _SOCKETS[machine]
    code += [_instruction(_EQUAL, first, 2, 0), _instruction(_EQUAL, second, 1, 0), _instruction(_RETURN, _ALLOW)]
    code.append(_instruction(_LOAD, _FIRST_ARGUMENT_AT))
    for family in _FAMILIES:
        code += [_instruction(_EQUAL, family, 0, 1), _instruction(_RETURN, _ALLOW)]
    code.append(_instruction(_RETURN, _DENY))
    return b"".join(code)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
