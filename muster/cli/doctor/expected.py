"""What each check of the preflight expects, for the documentation.

It is not in the preflight's table, because that travels with jobs.
"""

from collections.abc import Mapping
from typing import Final

EXPECTED: Final[Mapping[str, str]] = {
    "driver": "If the job was submitted with GPUs, a driver of GPUs is loaded, whatever their make.",
    "devices": "At least as many GPUs answer as the job was submitted with. If CUDA_VISIBLE_DEVICES is set, all "
    "that it names answer.",
    "shared-devices": "There are as many GPUs as workers. Not checked if --devices or CUDA_VISIBLE_DEVICES is given.",
    "device-memory": "Of each of the job's GPUs, at most 512 MiB are in use, or 5 % if that is more.",
    "folders": "The log folder takes a file, and has 256 MiB and an inode free.",
    "shared-memory": "/dev/shm has 128 MiB free, and 32 MiB more for each worker.",  # noqa: S108
    "descriptors": "A process may open 1024 files, or 64 for each worker and for the agent if that is less.",
    "processes": "For each worker, 64 more processes or threads may be started.",
    "site": "Each executable file of /etc/muster/preflight.d (or MUSTER_PREFLIGHT_DIR) exits with 0.",
    "reach": "Each node can connect to MASTER_ADDR.",
    "code": "The nodes have the same workspace. In jobs without a workspace, the script is the same (else a warning).",
    "versions": "Python, torch, CUDA, NCCL and the driver have the same version on all nodes.",
    "clock": "The nodes' clocks differ by at most 3 s.",
    "unlike-devices": "Nodes with the same number of workers have the same number of GPUs.",
    "bandwidth": "With `full`: an all-reduce works, and no node is slower than half of the median.",
}
