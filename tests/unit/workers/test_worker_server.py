"""Where the worker server of torch gets its socket: in the rank's own folder, under a name that is gone at once."""

import os
import socket
from pathlib import Path

import pytest

from muster.agent.workers.hooks import groups as group_hook


def test_a_socket_in_a_folder_whose_path_is_too_long_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:

        def start(path: str) -> object:
            server.bind(path)
            server.listen()
            assert len(os.listdir(folder)) == 1
            return server

        fd = group_hook._listen(start)
        client.connect(f"/proc/self/fd/{fd}")
        os.close(fd)
    assert os.listdir(folder) == []


def test_a_folder_that_holds_no_sockets_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / name for name in ("log", "temporary")]
    for folder in folders:
        folder.mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folders[0] / "error.json"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(folders[1]))
    seen = []

    def start(path: str) -> object:
        Path(path).touch()
        seen.append(os.path.dirname(os.path.realpath(path)))
        raise RuntimeError("no sockets here")

    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="no sockets here"):
        group_hook._listen(start)
    assert seen == [str(folders[0]), str(folders[1]), "/dev/shm"]
    assert [os.listdir(folder) for folder in folders] == [[], []]
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)
