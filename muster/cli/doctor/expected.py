"""What each check of the preflight expects, for the documentation.

It is not in the preflight's table, because that travels with jobs.
"""

from collections.abc import Mapping
from typing import Final

EXPECTED: Final[Mapping[str, str]] = {
    "driver": "If the job was submitted with GPUs, a driver of some kind is loaded.",
    "devices": "As many GPUs answer as the job was submitted with, or as CUDA_VISIBLE_DEVICES names.",
    "shared-devices": "There are as many GPUs as workers, unless the job names a number or is given some.",
    "device-memory": "At most 512 MiB or 5 % of each of the job's GPUs is in use.",
    "folders": "The log folder takes a file, and has 256 MiB and an inode free.",
    "shared-memory": "/dev/shm has 128 MiB free, and 32 MiB more for each worker.",  # noqa: S108
    "descriptors": "A process may have 1024 open files, or 64 for each worker and the agent if that is less.",
    "processes": "64 processes or threads may still be started for each worker.",
    "site": "Each executable file of /etc/muster/preflight.d (or MUSTER_PREFLIGHT_DIR) exits with 0.",
    "reach": "Each node can connect to MASTER_ADDR.",
    "code": "The nodes have the same workspace; without one, the same script (a warning).",
    "versions": "Python, torch, CUDA, NCCL and the driver have the same version on all nodes.",
    "clock": "The nodes' clocks differ by at most 3 s.",
    "unlike-devices": "Nodes with the same number of workers have the same number of GPUs.",
    "bandwidth": "With `full`: an all-reduce works, and no node is slower than half of the median.",
}
