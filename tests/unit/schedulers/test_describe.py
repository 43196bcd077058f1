"""What `describe` gives back is the AppDef that was submitted, field by field, on all three schedulers."""

import copy
import json
import os
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchx import specs
from torchx.specs import AppDef, BindMount, DeviceMount, Resource, RetryPolicy, Role, VolumeMount

from muster.schedulers.adapter.status import build_status
from muster.schedulers.adapter.supervised import AgentReports, build_supervised_facts
from muster.schedulers.docker import create_scheduler as create_docker
from muster.schedulers.kubernetes import create_scheduler as create_kubernetes
from muster.schedulers.kubernetes.running_apps.status import Observation, build_facts
from muster.schedulers.local import create_detached_scheduler as create_local
from muster.schedulers.secret_variables import mask_env
from muster.schedulers.supervision.app_folder import AppFolder, AppSpec

TEXT = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=12)
PLAIN = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False, allow_infinity=False) | TEXT
VALUES = PLAIN | st.lists(PLAIN, max_size=2) | st.dictionaries(TEXT, PLAIN, max_size=2)
ENV = st.dictionaries(st.sampled_from(["LR", "HF_TOKEN", "DATABASE_URL", "B_1", "PATH"]), TEXT, max_size=3)
MOUNTS = st.lists(
    st.builds(BindMount, src_path=st.just("/data"), dst_path=st.just("/mnt/a"), read_only=st.booleans())
    | st.builds(VolumeMount, src=st.just("claim"), dst_path=st.just("/mnt/b"), read_only=st.booleans())
    | st.builds(DeviceMount, src_path=st.just("/dev/fuse"), dst_path=st.just("/dev/f"), permissions=st.just("rw")),
    max_size=3,
    unique_by=lambda mount: mount.dst_path,
)
OTHER_LINE = {"base_image": st.none() | TEXT, "tags": st.dictionaries(TEXT, PLAIN, max_size=2)}
AGENT = ["-m", "muster.agent", "--nnodes", "2", "--rank0-env", specs.macros.rank0_env, "main.py"]


def has(kind, *names):
    known = {field.name for field in fields(kind)}
    return {name: OTHER_LINE[name] for name in names if name in known}


RESOURCES = st.builds(
    Resource,
    cpu=st.integers(0, 8),
    gpu=st.just(0),  # the others look for GPUs on this machine
    memMB=st.integers(0, 4096),
    capabilities=st.dictionaries(st.sampled_from(["arch", "zone"]), VALUES, max_size=2),
    devices=st.dictionaries(st.just("vpc.amazonaws.com/efa"), st.integers(0, 4), max_size=1),
    **has(Resource, "tags"),
)


@st.composite
def roles(draw, name):
    most = draw(st.integers(1, 4))
    runs_agent = draw(st.booleans())
    given_fields = {
        "name": name,
        "image": draw(st.sampled_from(["img", "registry:5000/img:1"])),
        "entrypoint": "python3" if runs_agent else "echo",
        "args": [*(AGENT if runs_agent else []), *draw(st.lists(TEXT, max_size=3))],
        "env": draw(ENV),
        "num_replicas": most,
        "min_replicas": draw(st.none() | st.integers(1, most)),
        "max_retries": draw(st.integers(0, 5)),
        "retry_policy": draw(st.sampled_from(RetryPolicy)),
        "resource": draw(RESOURCES),
        "port_map": draw(st.dictionaries(st.sampled_from(["c10d", "board"]), st.integers(1024, 65535), max_size=2)),
        "metadata": draw(st.dictionaries(TEXT, VALUES, max_size=2)),
        "mounts": draw(MOUNTS),
    }
    return Role(**given_fields, **draw(st.fixed_dictionaries(has(Role, "base_image"))))


@st.composite
def apps(draw):
    names = draw(st.lists(st.sampled_from(["trainer", "eval", "Param Server"]), min_size=1, max_size=3, unique=True))
    return AppDef(
        draw(st.sampled_from(["job", "digits/run", "Ünïcode"])),
        roles=[draw(roles(name)) for name in names],
        metadata=draw(st.dictionaries(TEXT, TEXT, max_size=2)),
    )


def describe_supervised(scheduler, roles, tmp_path, description):
    """Through the files that `describe` of another shell reads."""
    folder = tmp_path / f"app-{os.urandom(4).hex()}"
    spec = AppSpec(
        app_id="app", scheduler=scheduler, folder=str(folder), driver="x:y", roles=roles,
        grace_s=1.0, owner=None, description=description, details={},
    )  # fmt: skip
    AppFolder(folder).create(spec)
    return build_status(build_supervised_facts(AppFolder(folder).read_spec(), None, AgentReports()))


def describe_local(app, tmp_path):
    spec = create_local("test").submit_dryrun(app, {}).request.spec
    return describe_supervised("detached", spec.roles, tmp_path, spec.description)


def describe_docker(app, tmp_path):
    spec = create_docker("test").submit_dryrun(app, {}).request.spec
    return describe_supervised("docker", spec.roles, tmp_path, spec.description)


def describe_kubernetes(app, tmp_path):
    parent = create_kubernetes("test").submit_dryrun(app, {}).request.parents[0]
    return build_status(build_facts("app", Observation(parents=[json.loads(json.dumps(parent))], pods=[])))


@pytest.mark.parametrize("describe", [describe_local, describe_docker, describe_kubernetes])
def test_every_field_of_the_submitted_app(describe, tmp_path_factory, monkeypatch):
    tmp_path = tmp_path_factory.mktemp("apps")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    @settings(max_examples=15, deadline=None)
    @given(app=apps())
    def check(app):
        submitted = copy.deepcopy(app)  # 0.7 changes what it is given
        response = describe(app, tmp_path)
        assert len(response.roles) == len(submitted.roles)
        for role, was in zip(response.roles, submitted.roles, strict=True):
            for field in fields(was):
                expected = mask_env(was.env) if field.name == "env" else getattr(was, field.name)
                assert getattr(role, field.name) == expected, field.name
        if hasattr(response, "metadata"):
            assert response.metadata == submitted.metadata

    check()
