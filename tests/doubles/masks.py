"""What is left of a line when ranks' lines are compared, for one line alone."""

from muster._shared.console.units import Masks

_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)


def mask_line(line: bytes) -> bytes:
    """Return a line without digits, hexadecimal numbers and paths."""
    return Masks().mask(line.translate(_ZEROS))
