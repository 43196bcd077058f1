"""The classes of causes, by the names that `--on` uses, and what people read for them. `--on` has none for GAVE_UP.

`agent.diagnosis.classes` finds the class of a failure. `_shared.policy` lets a user say what follows from it.
"""

from collections.abc import Mapping
from typing import Final

USAGE: Final = "usage"
DATA: Final = "data"
HOST_OOM: Final = "host-oom"
DEVICE_OOM: Final = "device-oom"
DEVICE: Final = "device"
DISK: Final = "disk"
NETWORK: Final = "network"
PREEMPTION: Final = "preemption"
TIME_LIMIT: Final = "time-limit"
HANG: Final = "hang"
CRASH: Final = "crash"
GAVE_UP: Final = "gave-up"
UNKNOWN: Final = "unknown"

CLASSES: Final[Mapping[str, str]] = {
    USAGE: "program, arguments or environment",
    DATA: "data",
    HOST_OOM: "out of main memory",
    DEVICE_OOM: "out of memory of a device",
    DEVICE: "device or link",
    DISK: "full or failing disk",
    NETWORK: "network",
    PREEMPTION: "preemption",
    TIME_LIMIT: "time limit",
    HANG: "hang",
    CRASH: "program crash",
    GAVE_UP: "the program gave up",
    UNKNOWN: "unknown",
}
"""In the order of the documentation."""


def name_class(cause: str) -> str:
    """Name a class for people. Leave what is none as it is."""
    return CLASSES.get(cause, cause)
