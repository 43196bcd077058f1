"""An AppDef comes back as it was submitted, from JSON text, on both TorchX lines."""

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchx import specs
from torchx.specs import AppDef, BindMount, DeviceMount, Resource, RetryPolicy, Role, VolumeMount

from muster.schedulers.runner.app_codec import dump_app, load_app
from muster.schedulers.secret_variables import mask_env

pytestmark = pytest.mark.torchx

TEXT = st.text(max_size=8)
COUNTS = st.integers(0, 9)
PUBLIC = st.sampled_from(["A", "B_C", "PATH", "x"])
PLAIN = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | TEXT
VALUES = PLAIN | st.lists(PLAIN, max_size=2) | st.dictionaries(TEXT, PLAIN, max_size=2)
MOUNTS = (
    st.builds(BindMount, src_path=TEXT, dst_path=TEXT, read_only=st.booleans())
    | st.builds(VolumeMount, src=TEXT, dst_path=TEXT, read_only=st.booleans())
    | st.builds(DeviceMount, src_path=TEXT, dst_path=TEXT, permissions=st.sampled_from(["r", "rwm"]))
)
OTHER_LINE = {
    "base_image": st.none() | TEXT,
    "workspace": st.none()
    | (st.builds(specs.Workspace, projects=st.dictionaries(TEXT, TEXT)) if hasattr(specs, "Workspace") else st.none()),
    "tags": st.dictionaries(TEXT, PLAIN, max_size=2),
}


def has(kind, *names):
    known = {field.name for field in fields(kind)}
    return {name: OTHER_LINE[name] for name in names if name in known}


RESOURCES = st.builds(
    Resource,
    cpu=COUNTS,
    gpu=COUNTS,
    memMB=COUNTS,
    capabilities=st.dictionaries(TEXT, VALUES, max_size=2),
    devices=st.dictionaries(TEXT, COUNTS, max_size=2),
    **has(Resource, "tags"),
)
ROLES = st.builds(
    Role,
    name=TEXT,
    image=TEXT,
    entrypoint=TEXT,
    args=st.lists(TEXT, max_size=3),
    env=st.dictionaries(PUBLIC, st.sampled_from(["", "1", "a b", "é$${x}"]), max_size=3),
    num_replicas=COUNTS,
    min_replicas=st.none() | COUNTS,
    max_retries=COUNTS,
    retry_policy=st.sampled_from(RetryPolicy),
    resource=RESOURCES,
    port_map=st.dictionaries(TEXT, COUNTS, max_size=2),
    metadata=st.dictionaries(TEXT, VALUES, max_size=2),
    mounts=st.lists(MOUNTS, max_size=3),
    **has(Role, "base_image", "workspace"),
)
APPS = st.builds(AppDef, name=TEXT, roles=st.lists(ROLES, max_size=2), metadata=st.dictionaries(TEXT, TEXT, max_size=2))


@given(app=APPS)
def test_every_field_comes_back(app):
    back = load_app(json.loads(json.dumps(dump_app(app))))
    assert back == app
    for role, was in zip(back.roles, app.roles, strict=True):
        for field in fields(role):
            assert getattr(role, field.name) == getattr(was, field.name), field.name


def app_of(**role):
    given = {"name": "r", "image": "i", "entrypoint": "e", "resource": Resource(cpu=1, gpu=0, memMB=1)}
    return AppDef("a", roles=[Role(**(given | role))])


def test_secrets_are_masked_and_keys_of_the_adapter_left_out():
    app = app_of(env={"MY_TOKEN": "h1dden", "A": "b"}, metadata={"mine": "x", "yours": "y"})
    back = load_app(dump_app(app, without_metadata=("mine",)))
    role = replace(app.roles[0], env=mask_env(app.roles[0].env), metadata={"yours": "y"})
    assert back.roles == [role]
    assert "h1dden" not in json.dumps(dump_app(app))


def test_what_json_does_not_have_becomes_text():
    back = load_app(dump_app(app_of(metadata={"path": (1, {2: object})}))).roles[0].metadata
    assert back == {"path": [1, {"2": "<class 'object'>"}]}


def test_fields_and_values_of_the_other_line_are_passed_over():
    document = dump_app(app_of())
    document["roles"][0] |= {"future": 1, "retry_policy": "SOMETHING"}
    document["roles"][0]["resource"]["future"] = 1
    assert load_app(document) == app_of()
