"""What local_cwd would run, as a pure function of AppDef, options and facts about the host.

What an agent is given: `schedulers/test_whole_requests`.
"""

import copy
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
from torchx.specs import AppDef, Resource, Role
from torchx.specs.api import macros

import muster
from muster.schedulers.agent_command import AGENT_ENTRY
from muster.schedulers.errors import SchedulerError
from muster.schedulers.gpus import DeviceRequest, assign_devices, list_devices, needs_sharing, share_devices
from muster.schedulers.local.options import LocalOptions
from muster.schedulers.local.request import Host, build_request
from muster.schedulers.local.submission import find_interpreter, has_same_muster

TINY = Resource(cpu=1, gpu=0, memMB=1)
HOST = Host(cwd="/work", python="/venv/bin/python3", has_muster=True, env={"PATH": "/bin:/usr/bin"})


def make_app(**role):
    args = ["-m", "muster.agent", "--node-rank", macros.replica_id, "--rdzv-id", macros.app_id, "main.py"]
    fields = {
        "name": "trainer",
        "image": "i",
        "entrypoint": "python3",
        "args": args,
        "num_replicas": 2,
        "resource": TINY,
    }
    return AppDef("app", roles=[Role(**(fields | role))])


def build(app, host=HOST, **options):
    return build_request(app, LocalOptions(**options), name="app-x", token="t0ken", folder="/logs/app-x", host=host)


def plan(*args, **options):
    """The plans of the replicas of role `trainer`."""
    return build(*args, **options).spec.details["replicas"]["trainer"]


def test_the_appdef_is_not_changed_and_the_result_is_always_the_same():
    app = make_app(env={"A": macros.app_id})
    before = copy.deepcopy(app)
    assert build(app) == build(app)
    assert app == before


def test_an_app_without_agents_needs_no_bundle():
    plain = build(make_app(entrypoint="sh", args=[]), host=replace(HOST, has_muster=False))
    assert not plain.spec.details["needs_bundle"]


def test_other_roles_run_as_written_and_keep_torchruns_variables():
    launch = plan(make_app(entrypoint="python3", args=["main.py"]))[0]
    assert launch["command"] == ("python3", "main.py")
    assert not launch["runs_agent"]
    assert launch["env"]["PET_LOG_DIR"] == "/logs/app-x/trainer/torchelastic"
    assert not [name for name in launch["env"] if name.startswith("MUSTER_")]


@pytest.mark.parametrize(
    ("prepend", "role_path", "path"),
    [
        (False, None, "/bin:/usr/bin:/work"),
        (False, "/mine:", "/mine:/bin:/usr/bin:/work"),
        (True, "/mine", "/work:/mine:/bin:/usr/bin"),
    ],
)
def test_path(prepend, role_path, path):
    env = {} if role_path is None else {"PATH": role_path}
    assert plan(make_app(env=env), prepend_cwd=prepend)[0]["env"]["PATH"] == path


def test_a_variable_of_the_caller_takes_precedence():
    assert "PYTHONUNBUFFERED" not in plan(make_app(), host=replace(HOST, env={"PYTHONUNBUFFERED": ""}))[0]["env"]


def test_nothing_printed_is_secret():
    request = build(make_app(env={"WANDB_API_KEY": "h1dden"}))
    for text in (str(request), repr(request)):
        assert "t0ken" not in text
    assert "h1dden" not in str(request)
    assert AGENT_ENTRY in str(request)


def needs(role, replicas, each, runs_agent=True, **more):
    return DeviceRequest(role=role, replicas=replicas, each=each, runs_agent=runs_agent, **more)


def eight():
    return [str(index) for index in range(8)]


@pytest.mark.parametrize(
    ("wanted", "devices", "shares"),
    [
        ([needs("t", 2, 0)], eight(), {"t": ["0,1,2,3", "4,5,6,7"]}),
        ([needs("t", 2, 1)], eight(), {"t": ["0", "1"]}),  # as requested: they fit
        ([needs("t", 2, 4)], ["0", "1", "2", "3"], {"t": ["0,1", "2,3"]}),  # they do not
        ([needs("t", 3, 0)], eight(), {"t": ["0,1", "2,3", "4,5"]}),  # the same number each
        ([needs("t", 2, 0)], ["0"], {}),
        ([needs("t", 2, 0)], [], {}),
        ([needs("t", 1, 0)], eight(), {}),  # one node keeps them all
        ([needs("t", 1, 0), needs("reader", 5, 0, runs_agent=False)], eight(), {}),
        ([needs("t", 1, 0), needs("eval", 1, 2, runs_agent=False)], eight(), {"t": ["0,1,2,3"], "eval": ["4,5,6,7"]}),
        ([needs("t", 2, 0, chosen=True), needs("u", 2, 0)], ["0", "1"], {"u": ["0", "1"]}),
    ],
)
def test_several_nodes_share_the_devices_of_one_machine(wanted, devices, shares):
    assert share_devices(wanted, devices) == shares
    assert needs_sharing(wanted) or not shares


def test_nodes_get_their_share_without_being_asked():
    host = replace(HOST, devices=tuple(eight()))
    seen = [launch["env"].get("CUDA_VISIBLE_DEVICES") for launch in plan(make_app(), host)]
    assert seen == ["0,1,2,3", "4,5,6,7"]
    plain = plan(make_app(), host, auto_set_cuda_visible_devices=False)
    assert [launch["env"].get("CUDA_VISIBLE_DEVICES") for launch in plain] == [None, None]
    own = plan(make_app(env={"CUDA_VISIBLE_DEVICES": "7"}), host)
    assert [launch["env"]["CUDA_VISIBLE_DEVICES"] for launch in own] == ["7", "7"]


def test_slices_of_a_gpu_are_named_by_their_uuid(monkeypatch):
    listing = "GPU 0: A (UUID: GPU-a)\nGPU 1: B (UUID: GPU-b)\n  MIG 1g Device 0: (UUID: MIG-x)\n"
    answer = subprocess.CompletedProcess([], 0, stdout=listing)
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_options: answer)
    assert list_devices({}) == ("0", "MIG-x")


@pytest.mark.parametrize("text", ["-cfg env", "role"])
def test_variables_of_the_options_reach_all_replicas_and_a_role_overrides_them(text):
    role_env = {"A": "role"} if text == "role" else {}
    launch = plan(make_app(env=role_env), env={"A": "-cfg env", "B": "2"})[0]
    assert (launch["env"]["A"], launch["env"]["B"]) == (text, "2")


def test_devices_in_slices_in_order():
    wanted = [needs("a", 2, 2), needs("none", 3, 0, runs_agent=False), needs("b", 1, 1)]
    assert assign_devices(wanted, ["0", "1", "2", "3", "4", "5"]) == {"a": ["0,1", "2,3"], "b": ["4"]}
    assert assign_devices([needs("none", 3, 0)], []) == {}
    with pytest.raises(SchedulerError, match=r"5 GPUs \(a: 2 x 2, b: 1 x 1\), .* 1 \(7\)"):
        assign_devices(wanted, ["7"])
    with pytest.raises(SchedulerError, match=r"process may use 0$"):
        assign_devices(wanted, [])


@pytest.mark.parametrize(
    ("visible", "devices"),
    [("", ()), ("-1", ()), ("3, 1", ("3", "1")), ("0,-1,2", ("0",)), ("GPU-a,MIG-b", ("GPU-a", "MIG-b"))],
)
def test_devices_the_caller_may_see(visible, devices):
    assert list_devices({"CUDA_VISIBLE_DEVICES": visible}) == devices


def test_interpreters(tmp_path):
    for name in ("venv", "conda"):
        (tmp_path / name / "bin").mkdir(parents=True)
        python = tmp_path / name / "bin" / ("python3" if name == "venv" else "python")
        python.touch(mode=0o755)
    venv, conda = {"VIRTUAL_ENV": str(tmp_path / "venv")}, {"CONDA_PREFIX": str(tmp_path / "conda")}
    assert find_interpreter({}, "/own") == "/own"
    assert find_interpreter({"VIRTUAL_ENV": ""}, "/own") == "/own"
    assert find_interpreter(conda, "/own") == str(tmp_path / "conda/bin/python")
    assert find_interpreter(venv | conda, "/own") == str(tmp_path / "venv/bin/python3")
    with pytest.raises(SchedulerError, match="VIRTUAL_ENV=/gone has no bin/python3"):
        find_interpreter({"VIRTUAL_ENV": "/gone"}, "/own")


@pytest.mark.parametrize("sibling", [sys.executable, str(Path(sys.executable).with_name("python3"))])
def test_our_own_interpreter_is_not_started(monkeypatch, sibling):
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.setattr(muster, "__file__", f"{sysconfig.get_path('purelib')}/muster/__init__.py")
    assert has_same_muster(sibling)


def test_any_other_interpreter_is_started(monkeypatch, tmp_path):
    other = tmp_path / "bin" / "python3"
    other.parent.mkdir()
    other.symlink_to(Path(sys.executable).resolve())  # the same file, another environment
    asked = []

    def ask(command, **_options):
        asked.append(command[0])
        return subprocess.CompletedProcess(command, 0, stdout="0.0.0\n")

    monkeypatch.setattr(subprocess, "run", ask)
    monkeypatch.setattr(muster, "__file__", f"{sysconfig.get_path('purelib')}/muster/__init__.py")
    assert not has_same_muster(str(other))
    monkeypatch.setattr(muster, "__file__", str(tmp_path / "muster" / "__init__.py"))
    assert not has_same_muster(sys.executable)
    assert asked == [str(other), sys.executable]
