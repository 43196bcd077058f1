"""A worker that cannot open its agent's memory files: it becomes another user, or enters another user namespace.

    stranger.py user|namespace|nothing
"""

import ctypes
import os
import sys

import muster._shared.snapshot_file
import muster.snapshots.content
import muster.snapshots.saving  # noqa: F401  # that user may be unable to read the files
from muster import snapshots

NEW_USER_NAMESPACE = 0x10000000
if sys.argv[1] == "user":
    os.setgroups([])
    os.setgid(42422)
    os.setuid(42422)
elif sys.argv[1] == "namespace" and ctypes.CDLL(None).unshare(NEW_USER_NAMESPACE):
    print("no user namespaces here", flush=True)
    sys.exit(0)
found = snapshots.load()
for step in range(3):
    snapshots.save(step, {"x": 1})
print(f"loaded {found}, and went on", flush=True)
