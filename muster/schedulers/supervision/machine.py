"""Which machine an app runs on. Hosts may share state folders, and pids mean something on one machine only.

The boot id identifies it, because a host name may change during a job, and two hosts may have the same one. After a
reboot the id of the installation (machine-id(5)) says whether this is still the machine of an earlier boot.
"""

import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MACHINE_ID_FILES = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))
_PID_NAMESPACE = "/proc/self/ns/pid"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine, the boot and the process namespace in which an app's processes run."""

    host: str
    """For people, and for systems without a boot id."""
    boot_id: str
    """"" where the system has none."""
    machine_id: str
    """See `read_machine_id`."""
    pid_namespace: str
    """"" where the system has none."""

    @staticmethod
    def here() -> "Machine":
        """Name this machine, this boot, this process's namespace."""
        return Machine(
            host=socket.gethostname(),
            boot_id=read_line(_BOOT_ID),
            machine_id=read_machine_id(),
            pid_namespace=_read_link(_PID_NAMESPACE),
        )

    def shows_pids_of(self, other: "Machine") -> bool:
        """Return whether a pid recorded there is the same process here: same boot, same namespace."""
        return self.shares_kernel_with(other) and self.pid_namespace == other.pid_namespace

    def shares_kernel_with(self, other: "Machine") -> bool:
        """Return whether both run on one kernel, so that a lock on a file there is seen here."""
        return self.boot_id == other.boot_id if self.boot_id else self.host == other.host

    def is_later_boot_of(self, other: "Machine") -> bool:
        """Return whether this is the same machine after a reboot: nothing that ran there runs any more."""
        return not self.shares_kernel_with(other) and self.machine_id == other.machine_id


def read_machine_id() -> str:
    """Return a name of this installation of an operating system for good.

    It is another value than machine-id(5), which is not public.

    Returns:
        12 hexadecimal digits, or the host name where there is no such id (containers, systems other than Linux).
    """
    text = next(filter(None, map(read_line, _MACHINE_ID_FILES)), "")
    return hashlib.sha256(f"muster {text}".encode()).hexdigest()[:12] if text else socket.gethostname()


def read_line(path: Path) -> str:
    """Return the one line of a file of the system. "": it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _read_link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
