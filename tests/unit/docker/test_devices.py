"""GPUs: explicit, disjoint ids."""

import pytest
from docker_samples import build_app, build_container
from hypothesis import given
from hypothesis import strategies as st

from muster.schedulers.docker.running_apps.reservations import (
    assign_gpus,
    check_host,
    check_runtime,
    limit_visible,
    needs_sharing,
    share_gpus,
    shows_all_gpus,
)
from muster.schedulers.docker.sdk import DockerError
from muster.schedulers.gpus import parse_gpus

LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-aaaa)
GPU 1: NVIDIA H200 (UUID: GPU-bbbb)
  MIG 1g.18gb     Device  0: (UUID: MIG-1111)
  MIG 1g.18gb     Device  1: (UUID: MIG-2222)
"""


def test_listing_is_parsed_and_slices_replace_their_gpu():
    assert parse_gpus(LISTING) == {"GPU-aaaa": "0", "MIG-1111": "1", "MIG-2222": "1"}


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, ["GPU-a0", "GPU-b1", "GPU-c2"]),
        ("", []),
        ("2,0", ["GPU-c2", "GPU-a0"]),
        ("GPU-b", ["GPU-b1"]),
        ("1,7,0", ["GPU-b1"]),
        ("-1", []),
    ],
)
def test_what_the_caller_may_see(visible, found):
    assert limit_visible({"GPU-a0": "0", "GPU-b1": "1", "GPU-c2": "2"}, visible) == found


@given(
    wanted=st.lists(st.integers(0, 4), max_size=6),
    free=st.lists(st.text("abc", min_size=1), unique=True, max_size=12),
    in_use=st.sets(st.text("abc", min_size=1), max_size=4),
)
def test_replicas_never_share_and_never_get_a_device_in_use(wanted, free, in_use):
    usable = [device for device in free if device not in in_use]
    if sum(wanted) > len(usable):
        with pytest.raises(DockerError, match=f"needs {sum(wanted)} GPUs"):
            assign_gpus(wanted, free, in_use)
        return
    assigned = assign_gpus(wanted, free, in_use)
    assert [len(ids) for ids in assigned] == wanted
    flat = [device for ids in assigned for device in ids]
    assert len(set(flat)) == len(flat)
    assert set(flat) <= set(usable)


def test_engine_without_the_runtime_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DockerError, match=r"\(it has runc\)"):
        check_runtime({"Runtimes": {"runc": {}}})
    check_runtime({"Runtimes": {"runc": {}, "nvidia": {}}})
    check_runtime({"Runtimes": {"runc": {}}, "DiscoveredDevices": [{"ID": "nvidia.com/gpu=0"}]})
    (tmp_path / "nvidia-container-runtime-hook").touch(0o755)
    check_runtime({"Runtimes": {"runc": {}}})


@pytest.mark.parametrize("address", ["unix:///var/run/docker.sock", "tcp://localhost:2375", "tcp://[::1]:2375"])
def test_gpus_of_an_engine_on_this_machine_can_be_listed(address):
    check_host(address)


@pytest.mark.parametrize("address", ["tcp://10.0.0.7:2376", "ssh://me@gpu-box"])
def test_gpus_of_an_engine_on_another_machine_are_refused(address):
    with pytest.raises(DockerError, match=f"engine at {address} cannot"):
        check_host(address)


def app_of(*agents, gpus=0):
    """An app with a container for each; whether it runs the agent."""
    return build_app(*(build_container(replica=k, runs_agent=each, gpus=gpus) for k, each in enumerate(agents)))


def test_agents_share_what_all_of_them_would_see():
    app = app_of(True, True, False)
    assert needs_sharing(app, "unix:///var/run/docker.sock")
    assert [container.gpus for container in share_gpus(app, 8).containers] == [4, 4, 0]
    assert [container.gpus for container in share_gpus(app, 5).containers] == [2, 2, 0]
    assert share_gpus(app, 1) == app
    assert not needs_sharing(app, "tcp://elsewhere:2375")
    assert not needs_sharing(app_of(True, False), "unix:///x")
    assert not needs_sharing(app_of(True, True, gpus=1), "unix:///x")
    assert shows_all_gpus({"DefaultRuntime": "nvidia"})
    assert not shows_all_gpus({"DefaultRuntime": "runc", "Runtimes": {"nvidia": {}}})
