"""Aborts in C's `exit`: an early end does not run it."""

import ctypes
import hashlib  # noqa: F401  # brings libcrypto, whose exit handlers are its own

libc = ctypes.CDLL(None)
libc.on_exit(ctypes.cast(libc.abort, ctypes.c_void_p), None)
