"""Runs a command to which the kernel refuses a system call: `no_system_call.py NUMBER COMMAND...`. Standard library."""

import ctypes
import errno
import os
import platform
import struct
import sys

NO_NEW_PRIVS, SECCOMP, FILTER = 38, 22, 2
MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}.get(platform.machine())
"""None: this machine's number is not known here."""
LOAD_NUMBER, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM


def refuse(number: int) -> None:
    """Have this process and all that it starts get EPERM for a system call, as some container engines do.

    Raises:
        OSError: the system has no seccomp.
    """
    program = [(LOAD_NUMBER, 0, 0, 0), (JUMP_IF_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    head = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((NO_NEW_PRIVS, 1, 0, 0, 0), (SECCOMP, FILTER, ctypes.addressof(head), 0, 0)):
        if libc.prctl(*(ctypes.c_ulong(argument) for argument in arguments)):
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    refuse(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
