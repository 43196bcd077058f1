"""Allocates more memory than it may have."""

held = []
while True:
    held.append(bytearray(b"x" * (8 << 20)))
