"""Files that anything may have written are read within limits."""

import os
import tracemalloc
from pathlib import Path

import pytest

from muster._shared.foreign_files import read_regular


def test_a_small_file_takes_little_memory_whatever_the_limit_is(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(b"x" * 5000)
    tracemalloc.start()
    content = read_regular(str(path), 256 << 20)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert content == b"x" * 5000
    assert peak_bytes < 8 << 20


def test_a_large_one_is_read_to_its_limit_and_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    content = os.urandom(3 << 20)
    path.write_bytes(content)
    assert read_regular(str(path), 64 << 20) == content
    assert read_regular(str(path), (2 << 20) + 7) == content[: (2 << 20) + 7]
    assert read_regular(str(path), 64 << 20, -10) == content[-10:]
    assert read_regular(str(path), 0) == b""


def test_a_named_pipe_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        read_regular(str(tmp_path / "pipe"), 10)
