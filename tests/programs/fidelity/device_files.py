"""Who holds the GPU driver's files open: whoever has a CUDA context, or has only asked CUDA something, holds some."""

import os


def list_device_files(pid):
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            pass  # the one the listing used
    return sorted(name for name in found if name.startswith("/dev/nvidia"))
