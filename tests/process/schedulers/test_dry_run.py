"""`torchx run --dryrun` on every scheduler: readable, without secrets, and what is submitted is what was given."""

import copy
import json
import os
import pickle
import subprocess
import sys
from dataclasses import asdict
from pprint import pformat

import pytest
import yaml
from torchx.specs import AppDef, Resource, Role

from muster.schedulers.docker import create_scheduler as create_docker
from muster.schedulers.kubernetes import create_scheduler as create_kubernetes
from muster.schedulers.local import create_scheduler as create_local

pytestmark = pytest.mark.torchx

SECRET = "hunter2-abc"


@pytest.mark.parametrize("scheduler", ["local_cwd", "local_docker", "kubernetes"])
def test_what_people_read(scheduler, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "main.py").write_text("print('hello')\n")
    job = ["dist.ddp", "-j", "2x4", "--script", "main.py", "--env", f"HF_TOKEN={SECRET},LR=0.1"]
    job += ["--", f"--api_key={SECRET}", "--password", SECRET]
    done = subprocess.run(
        [sys.executable, "-m", "torchx.cli.main", "run", "-s", scheduler, "--dryrun", *job],
        cwd=tmp_path / "work", env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=90, check=True,
    )  # fmt: skip
    assert SECRET not in done.stdout + done.stderr
    application, _, request = done.stdout.partition("=== SCHEDULER REQUEST ===")
    for part in (application, request):
        assert "HF_TOKEN" in part
        assert "0.1" in part
        assert "--api_key=***" in part
    assert "'HF_TOKEN': '***'" in application
    assert len(request) < 12_000
    assert max(map(len, request.splitlines())) < 400, "no file in it"


@pytest.mark.parametrize("create", [create_local, create_docker, create_kubernetes])
def test_programs_get_the_values(create, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    resource = Resource(cpu=1, gpu=0, memMB=64)

    args = [f"--api_key={SECRET}", "--lr=0.1"]

    def build(env):
        return AppDef("a", [Role("r", image="img", entrypoint="true", args=list(args), env=env, resource=resource)])

    app = build({"HF_TOKEN": SECRET, "LR": "1"})
    given = copy.deepcopy(app)
    info = create("test").submit_dryrun(app, {})
    assert app == given
    assert type(app.roles[0].env["HF_TOKEN"]) is str
    printed = getattr(info, "app", None) or info._app
    assert printed == given
    assert SECRET not in pformat(asdict(printed)) + repr(printed) + str(info)
    for back in (
        pickle.loads(pickle.dumps(printed)),
        copy.deepcopy(printed),
        build(yaml.safe_load(yaml.safe_dump(printed.roles[0].env))),
        build(json.loads(json.dumps(printed.roles[0].env))),
    ):
        assert back.roles[0].env["HF_TOKEN"] == SECRET
        assert back.roles[0].args == args
