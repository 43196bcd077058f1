"""`describe` gives back the AppDef that was submitted, field by field, from another scheduler object too."""

from dataclasses import fields

import pytest
from torchx.runner import Runner
from torchx.specs import AppDef, BindMount, DeviceMount, Resource, RetryPolicy, Role, VolumeMount

from muster.schedulers.local import create_detached_scheduler

pytestmark = pytest.mark.torchx


def make_app():
    mounts = [
        BindMount(src_path="/tmp", dst_path="/data", read_only=True),
        VolumeMount(src="volume", dst_path="/v"),
        DeviceMount(src_path="/dev/null", dst_path="/dev/x", permissions="r"),
    ]
    resource = Resource(
        cpu=2, gpu=1, memMB=512, capabilities={"arch": "x", "n": 3}, devices={"vpc.amazonaws.com/efa": 1}
    )
    first = Role(
        name="one", image="image:1", entrypoint="/bin/sh", args=["-c", "true # é $HOME ${app_id}"], env={"LR": "0.1"},
        num_replicas=2, min_replicas=1, max_retries=3, retry_policy=RetryPolicy.REPLICA, resource=resource,
        port_map={"board": 6006}, metadata={"kubernetes": {"key": [1, True, None]}}, mounts=mounts,
    )  # fmt: skip
    second = Role(name="two", image="", entrypoint="/bin/true", resource=Resource(cpu=1, gpu=0, memMB=1))
    return AppDef("job", roles=[first, second], metadata={"team": "vision"})


def test_every_field_of_the_submitted_app(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with Runner("test", {"detached": create_detached_scheduler}) as runner:
        handle = runner.run(make_app(), "detached")
        runner.wait(handle, wait_interval=0.1)
    with Runner("test", {"detached": create_detached_scheduler}) as another:
        described = another.describe(handle)
    submitted = make_app()
    assert len(described.roles) == len(submitted.roles)
    for role, was in zip(described.roles, submitted.roles, strict=True):
        # TorchX adds variables of its own.
        role.env = {name: value for name, value in role.env.items() if not name.startswith("TORCHX_")}
        for field in fields(was):
            assert getattr(role, field.name) == getattr(was, field.name), f"{was.name}.{field.name}"
