"""The link `latest` beside the folders of jobs."""

import os

import pytest

from muster._shared import foreign_files
from muster._shared.foreign_files import link_latest, unlink_latest


@pytest.fixture
def jobs(tmp_path):
    folder = tmp_path / "jobs"
    folder.mkdir(mode=0o755)
    return folder


def test_it_names_the_newest(jobs):
    for name in ("a", "b", "b"):
        (jobs / name).mkdir(exist_ok=True)
        link_latest(str(jobs), name)
    assert os.readlink(jobs / "latest") == "b", "it goes on to hold when the folder is moved"
    assert sorted(os.listdir(jobs)) == ["a", "b", "latest"]


def test_it_goes_with_its_job(jobs):
    link_latest(str(jobs), "a")
    link_latest(str(jobs), "b")
    unlink_latest(str(jobs), "a")
    assert os.readlink(jobs / "latest") == "b"
    unlink_latest(str(jobs), "b")
    assert os.listdir(jobs) == []
    unlink_latest(str(jobs), "b")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_link_stays(jobs, kind):
    path = jobs / "latest"
    path.mkdir() if kind == "folder" else path.write_text("mine")
    link_latest(str(jobs), "a")
    unlink_latest(str(jobs), "latest")
    assert not path.is_symlink()
    assert os.listdir(jobs) == ["latest"]


def test_a_link_of_another_user_stays(jobs, monkeypatch):
    (jobs / "latest").symlink_to("theirs")
    monkeypatch.setattr(foreign_files.os, "geteuid", lambda: os.getuid() + 1)
    link_latest(str(jobs), "a")
    unlink_latest(str(jobs), "theirs")
    assert os.readlink(jobs / "latest") == "theirs"
    assert os.listdir(jobs) == ["latest"]


@pytest.mark.parametrize(("mode", "is_made"), [(0o777, False), (0o775, False), (0o1777, True), (0o700, True)])
def test_none_is_made_where_others_could_replace_it(jobs, mode, is_made):
    jobs.chmod(mode)
    link_latest(str(jobs), "a")
    assert (jobs / "latest").is_symlink() is is_made


def test_what_cannot_be_made_is_no_error(tmp_path):
    link_latest(str(tmp_path / "missing"), "a")
    unlink_latest(str(tmp_path / "missing"), "a")
