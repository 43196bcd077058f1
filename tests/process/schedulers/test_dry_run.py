"""`torchx run --dryrun` on every scheduler: readable, without secrets, and what is submitted is what was given."""

import copy
import json
import pickle
from dataclasses import asdict
from pprint import pformat

import pytest
import yaml
from torchx.specs import AppDef, Resource, Role

from muster.schedulers.docker import create_scheduler as create_docker
from muster.schedulers.kubernetes import create_scheduler as create_kubernetes
from muster.schedulers.local import create_scheduler as create_local

SECRET = "hunter2-abc"


@pytest.mark.torchx
@pytest.mark.parametrize(
    ("scheduler", "options", "argument"),
    [
        ("local_cwd", [], "--api_key=***"),
        ("local_docker", [], "--api_key=***"),
        ("slurm", [], "--api_key=***"),
        ("ssh", ["-cfg", "hosts=one,two"], "--api_key=***"),
        ("kubernetes", [], "--api_key=***"),
        ("kubernetes", ["-cfg", "dryrun=full"], "--api_key=$(MUSTER_ARGUMENT_0)"),
    ],
)
def test_what_people_read(scheduler, options, argument, tmp_path, monkeypatch, torchx):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "main.py").write_text("print('hello')\n")
    (tmp_path / "job.env").write_text(f"# not sent with the workspace\nPLAIN={SECRET}\n")
    (tmp_path / "job.env").chmod(0o600)
    job = ["dist.ddp", "-j", "2x4", "--script", "main.py", "--env", f"FROM_HERE,HF_TOKEN={SECRET},LR=0.1"]
    job += ["--env_file", str(tmp_path / "job.env"), "--", f"--api_key={SECRET}", "--password", SECRET]
    for name, value in (("XDG_STATE_HOME", str(tmp_path)), ("HOME", str(tmp_path)), ("FROM_HERE", SECRET)):
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path / "work")
    code, told, errors = torchx("run", "-s", scheduler, "--dryrun", *options, *job)
    assert code == 0, errors
    assert SECRET not in told + errors
    application, _, request = told.partition("=== SCHEDULER REQUEST ===")
    for part, word in ((application, "--api_key=***"), (request, argument)):
        assert "HF_TOKEN" in part
        assert "0.1" in part
        assert word in part
    for name in ("HF_TOKEN", "FROM_HERE", "PLAIN"):
        assert f"'{name}': '***'" in application
    if "dryrun=full" in options:
        return
    assert len(request) < 12_000
    assert max(map(len, request.splitlines())) < 500, "no file in it"


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
