"""The log of a replica that was not started: its files do not exist yet, or never will."""

import pytest

from muster.schedulers.local.logs import FileLogQuery, read_log

pytestmark = pytest.mark.torchx


@pytest.mark.parametrize("follow", [False, True])
def test_a_replica_that_was_never_started_has_no_lines(tmp_path, follow):
    """It was a traceback of the thread that reads."""
    query = FileLogQuery(folder=tmp_path / "r" / "0", stream="combined", follow=follow)
    assert list(read_log(query, lambda: True)) == []


def test_a_follower_waits_for_the_start(tmp_path):
    folder = tmp_path / "r" / "0"
    looks = []

    def has_ended():
        looks.append(1)
        if len(looks) == 2:
            folder.mkdir(parents=True)
            (folder / "combined.log").write_text("first\n")
        return len(looks) > 2

    query = FileLogQuery(folder=folder, stream="combined", follow=True)
    assert list(read_log(query, has_ended, tmp_path)) == ["first\n"]
