"""The log of a replica that was not started: its files do not exist yet, or never will."""

import pytest

from muster.schedulers.lines import read_lines
from muster.schedulers.processes.file_logs import FileSource


@pytest.mark.parametrize("follow", [False, True])
def test_a_replica_that_was_never_started_has_no_lines(tmp_path, follow):
    """It was a traceback of the thread that reads."""
    source = FileSource(tmp_path / "r" / "0", "combined")
    assert list(read_lines(source, lambda: True, follow=follow)) == []


def test_a_follower_waits_for_the_start(tmp_path):
    folder = tmp_path / "r" / "0"
    looks = []

    def has_ended():
        looks.append(1)
        if len(looks) == 2:
            folder.mkdir(parents=True)
            (folder / "combined.log").write_text("first\n")
        return len(looks) > 2

    assert list(read_lines(FileSource(folder, "combined", tmp_path), has_ended, follow=True)) == ["first\n"]
