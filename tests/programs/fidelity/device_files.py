"""Which processes hold the GPU driver's files open: any with a CUDA context, or that has only called CUDA."""

import os


def list_device_files(pid):
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            pass  # the descriptor that listed them
    return sorted(name for name in found if name.startswith("/dev/nvidia"))
