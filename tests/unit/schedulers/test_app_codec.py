"""An AppDef comes back as it was submitted, from JSON text, on both TorchX lines."""

import json
from dataclasses import replace

import pytest
from torchx.specs import AppDef, Resource, Role

from muster.schedulers.runner.app_codec import dump_app, load_app
from muster.schedulers.secret_variables import mask_env

pytestmark = pytest.mark.torchx


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
