"""Two real users with jobs on the same hosts: neither sees or ends what the other one has there."""

import contextlib
import os
import shutil
import stat
from pathlib import Path

import pytest
from harness import find_processes, wait_until
from other_user import needs_two_users, shared_dir
from ssh_jobs import wait_gone, wait_state, wait_text
from sshd_world import SshWorld, find_reason
from torchx.specs import AppState

from muster.testing.contract_apps import COUNTS, build_agents

__all__ = ["shared_dir"]

USERS = {"muster-ann": 42431, "muster-ben": 42432}
PYTHON = "/usr/bin/python3"

pytestmark = [needs_two_users, pytest.mark.long]


@pytest.fixture
def hosts(shared_dir):
    reason = find_reason()
    if reason is not None:
        pytest.skip(reason)
    made = SshWorld(shared_dir / "hosts", hosts=2, users=USERS)
    yield made
    made.close()
    for uid in USERS.values():
        shutil.rmtree(f"/tmp/muster-{uid}", ignore_errors=True)  # the agent's code, which stays on a host


def test_two_users_have_jobs_on_the_same_hosts(hosts, scheduler, shared_dir):
    runs = shared_dir / "runs"
    runs.mkdir()
    runs.chmod(0o1777)  # as /var/tmp
    ids = {}
    for user in USERS:
        cfg = {"hosts": [f"{user}@a", f"{user}@b"], "ssh": hosts.ssh, "python": PYTHON, "folder": str(runs)}
        ids[user] = scheduler.submit(build_agents(COUNTS), cfg)
    for user, app_id in ids.items():
        for index in range(2):
            wait_text(scheduler, app_id, "of 2 counts", index)
        folder = runs / f"muster-{app_id}"
        assert folder.stat().st_uid == USERS[user]
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        owners = set()
        for pid in find_processes(f"{folder}/"):
            with contextlib.suppress(FileNotFoundError):
                owners.add(os.stat(f"/proc/{pid}").st_uid)
        assert owners & set(USERS.values()) == {USERS[user]}
    ann, ben = ids.values()
    scheduler.cancel(ann)
    wait_state(scheduler, ann, AppState.CANCELLED)
    assert scheduler.describe(ben).state is AppState.RUNNING
    names = lambda: [path.name for path in Path(runs).iterdir()]  # noqa: E731
    wait_until(lambda: names() == [f"muster-{ben}"], what="the other one's folder is gone")
    assert scheduler.stop_app(ben, 30.0).step is not None
    wait_state(scheduler, ben, AppState.CANCELLED)
    wait_gone(runs)
