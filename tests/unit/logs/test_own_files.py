"""`--log-dir` where other users can write: what one of them has put there is not used."""

import json
import os
import stat
from pathlib import Path

import pytest
from doubles.samples import make_record, make_round
from other_user import OTHER, call_as_other, needs_two_users, other_dir, shared_dir

from muster.agent import checkpoint_file
from muster.agent.errors import EnvironmentFault
from muster.agent.logs import open_own, replace_file
from muster.agent.logs.files import RunFolder
from muster.agent.runtime.event_log import JsonlSink

__all__ = ["other_dir", "shared_dir"]

APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


@pytest.fixture
def public_dir(shared_dir: Path) -> Path:
    """As /tmp."""
    shared_dir.chmod(0o1777)
    return shared_dir


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_run_folder_is_this_users_alone(public_dir: Path) -> None:
    RunFolder(str(public_dir / "logs"), "job").open_attempt(make_round(), 1)
    assert mode_of(public_dir / "logs/job") == 0o700


def test_where_new_files_get_the_folders_group_it_can_read_them(public_dir: Path) -> None:
    (public_dir / "logs").mkdir()
    (public_dir / "logs").chmod(0o2775)
    RunFolder(str(public_dir / "logs"), "job")
    assert mode_of(public_dir / "logs/job") & 0o777 == 0o750


@needs_two_users
def test_a_folder_of_another_user_is_named_and_not_used(public_dir: Path) -> None:
    call_as_other(lambda: os.mkdir(public_dir / "job"))
    with pytest.raises(PermissionError, match=rf"another user \({OTHER}\): '{public_dir}/job'"):
        RunFolder(str(public_dir), "job")
    call_as_other(lambda: os.mkdir(public_dir / "logs"))
    with pytest.raises(PermissionError, match=rf"another user \({OTHER}\): '{public_dir}/logs'"):
        RunFolder(str(public_dir / "logs"), "job")


@needs_two_users
@pytest.mark.parametrize("name", ["attempt_0", "attempt_0/1", "node_0"])
def test_nor_is_one_below_a_folder_that_all_can_write(public_dir: Path, name: str) -> None:
    (public_dir / "job").mkdir()
    (public_dir / "job").chmod(0o777)
    call_as_other(lambda: os.makedirs(public_dir / "job" / name))
    folder = RunFolder(str(public_dir), "job")
    with pytest.raises(PermissionError, match="another user"):
        folder.open_attempt(make_round(group_world_size=2 if name == "node_0" else 1, number=2), 2)


@needs_two_users
def test_a_link_is_not_followed(public_dir: Path) -> None:
    """The job would write into any file of its user."""
    public_dir.chmod(0o777)  # in a folder with the sticky bit the kernel does not follow it either
    mine, path = public_dir / "mine", public_dir / "events.jsonl"
    call_as_other(lambda: os.symlink(mine, path))
    with pytest.raises(OSError, match="a link"):
        open_own(str(path), APPEND)
    troubles: list[str] = []
    sink = JsonlSink(str(path), lambda call: call(), open_own, troubles.append)
    sink.write(make_record("fenced"))
    [trouble] = troubles
    assert (str(path) in trouble, trouble.endswith(" a link")) == (True, True)
    assert not mine.exists()


def test_nor_by_the_file_that_says_how_far_the_job_is(tmp_path: Path) -> None:
    """The owner of a volume knows its name."""
    made = f"status.json.{os.uname().nodename}.{os.getpid()}.tmp"
    (tmp_path / made).symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="it is a link"):
        replace_file(str(tmp_path / "status.json"), b"{}")
    assert not (tmp_path / "mine").exists()
    replace_file(str(tmp_path / "status.json"), b"{}")
    assert (tmp_path / "status.json").read_text() == "{}"


@needs_two_users
def test_a_file_of_another_user_is_not_written(public_dir: Path) -> None:
    call_as_other(lambda: (public_dir / "events.jsonl").write_text(""))
    with pytest.raises(PermissionError, match="another user"):
        open_own(str(public_dir / "events.jsonl"), APPEND)


@needs_two_users
def test_a_planted_checkpoint_is_refused_and_named(public_dir: Path) -> None:
    (public_dir / "job").mkdir()
    (public_dir / "job").chmod(0o777)
    planted = json.dumps({"number": 9, "step": 5, "path": "/tmp/evil.pt"})
    call_as_other(lambda: (public_dir / "job/checkpoint.json").write_text(planted))
    refusal = rf"{public_dir}/job/checkpoint.json: .* another user"
    with pytest.raises(EnvironmentFault, match=refusal):
        checkpoint_file.find(str(public_dir / "job"), "")


NO_CHECKPOINT = [
    "[" * 100_000,
    "5",
    "x",
    '{"number": 1}',
    '{"number": "1", "step": 1, "path": "/a"}',
    '{"number": 1, "step": 1, "path": "/a\u0000b"}',
]


@pytest.mark.parametrize("text", NO_CHECKPOINT, ids=range(len(NO_CHECKPOINT)))
def test_a_checkpoint_that_no_agent_wrote_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "checkpoint.json").write_text(text)
    assert checkpoint_file.find(str(tmp_path), "") is None


def test_a_pipe_in_a_checkpoints_place_holds_nothing_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "checkpoint.json")
    assert checkpoint_file.find(str(tmp_path), "") is None


@needs_two_users
def test_a_volume_of_another_user_is_used_and_its_owner_can_read_the_logs(other_dir: Path) -> None:
    """A container's user is seldom the volume's. In a folder where only root can write, nobody else has put it."""
    call_as_other(lambda: os.makedirs(other_dir / "logs/job/attempt_0"))  # and what its owner made is used, too
    folder = RunFolder(str(other_dir / "logs"), "job")
    assert folder.base_owner == OTHER, "the agent says so"
    folder.open_attempt(make_round(number=2), 1)
    RunFolder(str(other_dir / "logs"), "next").open_attempt(make_round(), 1)
    call_as_other(lambda: os.listdir(other_dir / "logs/next/attempt_0/0"))
    assert mode_of(other_dir / "logs/next") == 0o777 & ~0o022


@needs_two_users
def test_a_file_system_that_shows_our_files_as_another_users(public_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS with root_squash: what root makes belongs to nobody, also in the next incarnation."""
    (public_dir / "job").mkdir()
    os.chown(public_dir / "job", 65534, 65534)
    fstat = os.fstat

    def show(fd: int) -> os.stat_result:
        status = list(fstat(fd))
        status[4] = 65534
        return os.stat_result(status)

    with pytest.raises(PermissionError):
        RunFolder(str(public_dir), "job")
    monkeypatch.setattr("os.fstat", show)
    RunFolder(str(public_dir), "job").open_attempt(make_round(), 1)
    monkeypatch.undo()
    assert [path.name for path in public_dir.iterdir()] == ["job"]
