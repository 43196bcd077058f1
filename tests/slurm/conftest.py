"""The shared Slurm of .ci/slurm, or one of a test's own to break."""

import shutil
import tempfile

import pytest
from harness import skip_or_fail
from slurm_world import Cluster, Job, find_shared


@pytest.fixture(scope="session", autouse=True)
def shared():
    """The cluster that several worktrees use: a test looks only at its own jobs, and breaks nothing."""
    cluster = find_shared()
    if cluster is not None:
        return cluster
    skip_or_fail("slurm", "no Slurm answers; .ci/slurm start starts one (as root)")


@pytest.fixture
def slurm(shared, monkeypatch):
    """The shared cluster's commands are on PATH."""
    use(shared, monkeypatch)
    yield shared
    for job in list(Job.open):
        job.close()


@pytest.fixture
def own_slurm(shared, tmp_path, monkeypatch):
    """A cluster of the test's own, to break. The sockets of its steps have paths of at most 108 bytes."""
    cluster = Cluster(tempfile.mkdtemp(prefix="slurm-"))
    try:
        cluster.script("start")
        use(cluster, monkeypatch)
        yield cluster
    finally:
        Job.open.clear()
        shutil.copytree(cluster.home / "log", tmp_path / "slurm-log")  # for whoever looks at a failure
        cluster.script("stop")


def use(cluster, monkeypatch):
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
