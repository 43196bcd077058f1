"""What the file system refuses is one line of the command, with the file or the folder."""

import errno
import os

import pytest

from muster.schedulers.docker import create_scheduler
from muster.schedulers.docker.live.payload import PackedWorkspaces
from muster.schedulers.errors import EngineError, describe_os_error


def make_error(code: int, *name: str) -> OSError:
    return OSError(code, os.strerror(code), *name)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (make_error(errno.ENOSPC), "/folder: No space left on device"),
        (make_error(errno.ENOSPC, "/file"), "/file: No space left on device"),
        (make_error(errno.EACCES, "/file"), "/file: Permission denied"),
        (make_error(errno.EMFILE), "Too many open files"),
    ],
)
def test_an_error_names_the_file_or_the_full_folder(error, line):
    assert describe_os_error(error, "/folder") == line


def test_a_full_disk_under_a_packed_workspace_is_one_line(monkeypatch, tmp_path):
    def fail(*_):
        raise make_error(errno.ENOSPC)

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(PackedWorkspaces, "pack", fail)
    scheduler = create_scheduler("torchx")
    try:
        with pytest.raises(EngineError, match=rf"^{tmp_path}/muster: No space left on device$"):
            scheduler.build_workspace_and_update_role(None, f"file://{tmp_path}", {})
    finally:
        scheduler.close()
