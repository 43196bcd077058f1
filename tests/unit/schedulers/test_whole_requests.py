"""All that local_cwd and Docker would run, as a file has it: no change of an agent's environment goes unseen."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from torchx.specs import AppDef, Resource, Role, macros

from muster._shared.contract import RoleKey
from muster.schedulers.agent_command import AGENT_ENTRY
from muster.schedulers.docker.options import DockerOptions
from muster.schedulers.docker.request import RequestBuilder
from muster.schedulers.local.options import LocalOptions
from muster.schedulers.local.request import Host
from muster.schedulers.local.request import build_request as build_local_request

pytestmark = pytest.mark.torchx

WHOLE = Path(__file__).with_name("whole_requests.json")
ENV = {"HOME": "/home/u", "PATH": "/bin:/usr/bin"}
HOST = Host(cwd="/work", python="/venv/bin/python3", has_muster=True, env=ENV)
BUNDLED = replace(HOST, python="/py", has_muster=False, draws_bars=True, devices=("0", "1", "2", "3"))


def agent(name="trainer", **changes):
    args = ["-m", "muster.agent", "--rank0-env", macros.rank0_env, "--node-rank", macros.replica_id]
    args += ["--rdzv-id", macros.app_id, *changes.pop("flags", []), "main.py", f"--out={macros.img_root}/x"]
    given = {"image": "img:1", "entrypoint": "python3", "args": args, "num_replicas": 2}
    return Role(name=name, **given | {"resource": Resource(cpu=1, gpu=0, memMB=64)} | changes)


def plain(name="reader", **changes):
    given = {"image": "img:2", "entrypoint": "sh", "args": ["-c", f"echo {macros.replica_id}"], "num_replicas": 1}
    return Role(name=name, **given | {"resource": Resource(cpu=1, gpu=0, memMB=64)} | changes)


def list_apps():
    own = {"A": macros.app_id, "MUSTER_LOG_DIR": "/mine", "TORCHELASTIC_ERROR_FILE": "/e", "PYTHONUNBUFFERED": "0"}
    return {
        "one": AppDef("app", roles=[agent()]),
        "several": AppDef("app", roles=[plain(), agent("actor"), agent("critic", num_replicas=1)]),
        "own": AppDef("app", roles=[agent(env=own, metadata={RoleKey.SECRET_ENV: "A"}), plain(env=own)]),
        "grace": AppDef("app", roles=[agent(flags=["--shutdown-timeout", "9"], entrypoint="/opt/py/python3.12")]),
        "elastic": AppDef("app", roles=[agent(num_replicas=4, min_replicas=2, max_retries=3)]),
        "gpus": AppDef("app", roles=[agent(resource=Resource(cpu=1, gpu=1, memMB=64))]),
    }


def build_all():
    built = {}
    local = {"": {}, "bundled": {}, "set": {"grace_s": 60.0, "env": {"B": "b", "MUSTER_ADAPTER": "x"}}}
    docker = {"": {}, "host": {"network": "host"}, "image": {"agent": "image", "network": "shared"}}
    docker["set"] = {"grace_s": 60.0, "env": {"B": "b", "MUSTER_ADAPTER": "x"}}
    for name, app in list_apps().items():
        for how, given in local.items():
            host = BUNDLED if how == "bundled" else HOST
            names = {"name": "app-x", "token": "t0ken", "folder": "/logs/app-x"}
            made = asdict(build_local_request(app, LocalOptions(**given), **names, host=host))
            for known in ("description", "python", "import_root"):
                del made["spec"][known]
            built[f"local {how} {name}"] = made
        for how, given in docker.items():
            draws_bars = how == "set"
            names = {"name": "app-x", "token": "t0ken", "user": "0@here"}
            builder = RequestBuilder(app=app, options=DockerOptions(**given), **names, draws_bars=draws_bars)
            built[f"docker {how} {name}"] = builder.build().to_json()
    return json.dumps(built, indent=1, sort_keys=True).replace(AGENT_ENTRY, "AGENT_ENTRY") + "\n"


def test_requests_are_as_written():
    assert build_all() == WHOLE.read_text(), f"to accept the change: write the text to {WHOLE}"
