"""Waits in C without releasing the interpreter's lock, with a second thread in Python, until it is killed."""

import ctypes
import os
import threading


def second():
    threading.Event().wait()


threading.Thread(target=second, daemon=True).start()
print("waiting", flush=True)
ends = os.pipe()
ctypes.PyDLL(None).read(ends[0], ctypes.create_string_buffer(1), 1)  # no handler in Python could run now
