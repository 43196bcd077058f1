"""The caches of compilers outlive their containers where that is asked for."""

import os
import re
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from torchx.specs import AppState, BindMount

from muster.cli.leftovers import find_leftovers
from muster.components import dist

pytestmark = pytest.mark.docker

PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "inductor_cache.py"
SEEDED = """
import os, pathlib, time
file = pathlib.Path("/tmp/torchinductor_root/ab/cab.py")
is_new = not file.parent.exists()
print("here", flush=True)
if os.environ["RANK"] == "0" and is_new:
    file.parent.mkdir(parents=True)
    file.write_text("compiled")
    os.utime(file, (time.time() - 60,) * 2)
    time.sleep(600)
while not file.exists():
    time.sleep(0.05)
print("found", file.read_text(), flush=True)
"""
"""Rank 0 has compiled when the other node is lost; it ends where the caches have the file."""
HOST = ("/usr", "/etc/alternatives", sys.base_prefix, sys.prefix, str(PROGRAM.parent))
"""What a compiler and this Python need of the machine: the test image has no compiler."""


@pytest.fixture
def cache(client):
    """The name of a cache that no other test uses."""
    name = f"test-{os.urandom(4).hex()}"
    yield name
    for volume in client.volumes.list(filters={"label": f"io.muster.cache={name}"}):
        volume.remove(force=True)


@pytest.mark.long
@pytest.mark.timeout(700)  # the compiler takes 20 s of CPU time
def test_the_second_container_of_a_replica_finds_what_the_first_has_compiled(cache, apps, app_of):
    """Its exit code is 3 until the cache has it, and it may run twice."""
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler here")
    folders = [each for each in HOST if each == "/usr" or not each.startswith("/usr/")]
    mounts = [BindMount(src_path=each, dst_path=each, read_only=True) for each in dict.fromkeys(folders)]
    app = app_of(f"{sys.executable} {PROGRAM}", max_retries=1, mounts=mounts)
    app_id = apps.run(app, compile_cache=cache)
    status = apps.wait(app_id, deadline_s=600)
    told = [re.findall(r"(\w+) (\d+)", line)[:2] for line in apps.logs(app_id) if line.startswith("hits")]
    assert told == [[("hits", "0"), ("misses", "1")], [("hits", "1"), ("misses", "0")]], apps.logs(app_id)
    assert (status.state, status.num_restarts) == (AppState.SUCCEEDED, 1), status.msg


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_container_that_takes_over_gets_what_another_one_has_compiled(apps, wait_until, tmp_path):
    """Without a volume the caches are in the containers."""
    (tmp_path / "seeded.py").write_text(SEEDED)
    patient = {"start": "cold", "max_retries": 1, "rdzv_conf": "keep_alive_max_attempt=60"}
    app = dist.ddp(script="seeded.py", j="2x1", image="muster-test:torch", name="job", **patient)
    app_id = apps.run(app, workspace=str(tmp_path))

    def read_log(index):
        return "".join(apps.logs(app_id, role=app.roles[0].name, replica=index))

    wait_until(lambda: all("here" in read_log(index) for index in (0, 1)), "both nodes run")
    next(iter(apps.containers(app_id, every=False, replica=1))).kill()
    status = apps.wait(app_id, deadline_s=200)
    assert status.state == AppState.SUCCEEDED, read_log(1)
    assert re.search(r"got 1 file \(0\.0 MB\) of compile caches from \d", read_log(1)), read_log(1)
    assert all("found compiled" in read_log(index) for index in (0, 1))


def test_a_cache_is_the_users_own_and_removed_by_prune(cache, apps, app_of, client):
    """Workers of any user write to it, also below a read-only root."""
    words = (
        'mkdir -p "$TORCHINDUCTOR_CACHE_DIR" && echo $TRITON_CACHE_DIR > "$TORCHINDUCTOR_CACHE_DIR/x" && echo written'
    )
    first = apps.run(app_of(words), compile_cache=cache, user="4242", read_only=True)
    assert apps.wait(first).state == AppState.SUCCEEDED, apps.logs(first)
    second = apps.run(
        app_of('cat "$TORCHINDUCTOR_CACHE_DIR/x"; echo $CUDA_CACHE_PATH'), compile_cache=cache, user="4242"
    )
    assert apps.wait(second).state == AppState.SUCCEEDED
    assert apps.logs(second) == ["/var/opt/muster-cache/triton\n", "/var/opt/muster-cache/cuda\n"]
    (volume,) = client.volumes.list(filters={"label": f"io.muster.cache={cache}"})

    def find():
        with ExitStack() as opened:
            found = find_leftovers(os.environ, ended_before_s=time.time(), opened=opened)
        return [each for each in found if volume.name in each.name]

    assert find() == [], "a container has it"
    apps.delete(first)
    apps.delete(second)
    (left,) = find()
    assert left.what == "compile caches that no container has"
    left.remove()
    assert client.volumes.list(filters={"label": f"io.muster.cache={cache}"}) == []
