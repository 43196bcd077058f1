from dataclasses import replace

import pytest
from torchx.specs import AppDef, Resource, Role, macros
from torchx.specs.api import InvalidRunConfigException
from torchx.specs.finder import ComponentValidationException

from muster._shared.job_view import JobStatus
from muster.schedulers.adapter import supervised
from muster.schedulers.adapter.status import build_status
from muster.schedulers.errors import OptionError, SchedulerError
from muster.schedulers.runner import roles
from muster.schedulers.runner.app_codec import dump_app
from muster.schedulers.runner.option_parsing import StrictOpts
from muster.schedulers.supervision.app_folder import AppRecord, AppSpec
from muster.schedulers.supervision.machine import Machine
from muster.schedulers.supervision.state import (
    AppPhase,
    Outcome,
    ReplicaId,
    ReplicaState,
    ReplicaStatus,
    RetryScope,
    SupervisedApp,
)
from muster.schedulers.wording.reasons import Code, JobFacts, Reason

BOOLS = "one of true, 1, yes, on, false, 0, no, off"
ALL = "`torchx runopts local_cwd` lists all"
TINY = Resource(cpu=1, gpu=0, memMB=1)


@pytest.fixture
def opts():
    opts = StrictOpts("local_cwd")
    opts.add("detach", type_=bool, default=False, help="stay")
    opts.add("grace_s", type_=float, default=30.0, help="grace")
    opts.add("count", type_=int, default=1, help="how many")
    opts.add("log_dir", type_=str, default=None, help="where")
    opts.add("names", type_=list[str], default=None, help="names")
    opts.add("labels", type_=dict[str, str], default=None, help="labels")
    return opts


def resolve(opts, text):
    return opts.resolve(opts.cfg_from_str(text))


@pytest.mark.parametrize(
    "value",
    [
        '{"spec": {"hostname": "a; b", "tolerations": [{"key": "a,b=c"}]}}',
        '{"metadata": {"annotations": {"a": "} \\" ,;", "b": "it\'s"}}}',
        "{spec: {hostname: 'a}; b', subdomain: x}}",
        "{}",
    ],
)
def test_inline_json_is_kept_as_it_is(opts, value):
    for text in (f"log_dir={value},count=2", f"count=2; log_dir = {value} ;names=a;b"):
        assert (resolve(opts, text)["log_dir"].strip(), resolve(opts, text)["count"]) == (value, 2)
    assert opts.cfg_from_str(f"names=a;b,log_dir={value}") == {"names": "a,b", "log_dir": value}


def test_braces_that_are_not_closed_reach_the_option(opts):
    assert opts.cfg_from_str('log_dir={"a": 1, count=2') == {"log_dir": '{"a": 1, count=2'}


@pytest.mark.parametrize(
    ("words", "value"), [("true TRUE 1 yes on True", True), ("false 0 no off False", False)], ids=["true", "false"]
)
def test_words_for_true_and_false(opts, words, value):
    assert [resolve(opts, f"detach={word}")["detach"] for word in words.split()] == [value] * len(words.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("detach=maybe", f"option 'detach' of local_cwd must be {BOOLS}, not 'maybe'"),
        ("count=1.5", "option 'count' of local_cwd must be a whole number, not '1.5'"),
        ("count=\u0661", "option 'count' of local_cwd must be a whole number, not '\u0661'"),
        ("grace_s=soon", "option 'grace_s' of local_cwd must be a number, not 'soon'"),
        ("grace_s=nan", "option 'grace_s' of local_cwd must be a number, not 'nan'"),
        ("labels=a", "option 'labels' of local_cwd must be key:value pairs separated by ;, not 'a'"),
        ("detatch=1", f"local_cwd has no option 'detatch'; did you mean 'detach'? {ALL}"),
        ("label=a", f"local_cwd has no option 'label'; did you mean 'labels'? {ALL}"),
        ("zzz=1", f"local_cwd has no option 'zzz'; {ALL}"),
        ("detach", f"option 'detach' of local_cwd must be {BOOLS}, not ''"),
        ("detach=1,detach=0", None),
    ],
)  # fmt: skip
def test_wrong_options_are_one_line(opts, text, message):
    if message is None:
        assert resolve(opts, text)["detach"] is False  # the last one wins, as with TorchX
        return
    with pytest.raises(OptionError) as caught:
        resolve(opts, text)
    assert str(caught.value) == message
    # What the command lines of both TorchX lines turn into a message, and what callers in Python expect.
    assert isinstance(caught.value, (ComponentValidationException))
    assert isinstance(caught.value, InvalidRunConfigException)
    assert isinstance(caught.value, ValueError)


@pytest.mark.torchx
def test_lists_and_dicts(opts):
    cfg = resolve(opts, "names=a,b;c,labels=x:1;y:2:3,grace_s=.5")
    assert cfg["names"] == ["a", "b", "c"]
    assert cfg["labels"] == {"x": "1", "y": "2:3"}
    assert cfg["grace_s"] == 0.5


@pytest.mark.torchx
def test_values_from_python_are_checked_too(opts):
    assert opts.resolve({"detach": True, "grace_s": 3, "names": ["a"]})["grace_s"] == 3
    for wrong in ({"detach": 3}, {"grace_s": True}, {"count": 1.5}, {"names": [1]}, {"log_dir": 1}):
        with pytest.raises(OptionError):
            opts.resolve(wrong)


@pytest.mark.torchx
def test_defaults_fill_in_and_resolving_twice_changes_nothing(opts):
    once = opts.resolve({})
    assert once["grace_s"] == 30.0
    assert opts.resolve(once) == once


def test_camel_case_is_accepted_but_not_with_two_values(opts):
    assert opts.resolve({"logDir": "/x"})["log_dir"] == "/x"
    with pytest.raises(OptionError, match="given twice"):
        opts.resolve({"logDir": "/x", "log_dir": "/y"})


@pytest.mark.torchx
def test_required(opts):
    opts.add("must", type_=str, required=True, help="it must")
    with pytest.raises(OptionError, match=r"'must' \(it must\)"):
        opts.resolve({})


def make_role(**more):
    return Role(**({"name": "r", "image": "", "entrypoint": "sh", "resource": TINY} | more))


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ({"name": "a/b"}, "role name 'a/b' must be a non-empty word without '/'"),
        ({"name": ".."}, "role name '..' must be"),
        ({"entrypoint": ""}, "role 'r' has no entrypoint"),
        ({"num_replicas": 0}, "num_replicas must be 1 to 16384, not 0"),
        ({"num_replicas": 65536}, "num_replicas must be 1 to 16384, not 65536"),
        ({"max_retries": -1}, "max_retries must be at least 0, not -1"),
        ({"min_replicas": 3, "num_replicas": 2}, r"min_replicas must be from 1 to num_replicas \(2\), not 3"),
        ({"min_replicas": 0}, r"min_replicas must be from 1 to num_replicas \(1\), not 0"),
    ],
)
def test_invalid_roles_are_refused(role, message):
    with pytest.raises(SchedulerError, match=message):
        roles.check_roles(AppDef("app", roles=[make_role(**role)]))


def test_invalid_apps_are_refused():
    with pytest.raises(SchedulerError, match="has no roles"):
        roles.check_roles(AppDef("app"))
    with pytest.raises(SchedulerError, match="must differ"):
        roles.check_roles(AppDef("app", roles=[make_role(), make_role()]))


@pytest.mark.parametrize(
    ("workspace", "path"), [("file:///a/b", "/a/b"), ("/a/b", "/a/b"), ("a", "a"), ("file://", ".")]
)
def test_workspace_paths(workspace, path):
    assert roles.get_workspace_path(workspace) == path


def test_workspaces_on_other_file_systems_are_refused():
    with pytest.raises(SchedulerError, match="'memory://x' is not"):
        roles.get_workspace_path("memory://x")


@pytest.mark.torchx
def test_macros_do_not_change_the_role():
    role = make_role(args=[macros.app_id, macros.replica_id], env={"A": macros.rank0_env})
    applied = roles.apply_macros(role, app_id="x", replica_id=3)
    assert applied.args == ["x", "3"]
    assert applied.env == {"A": "TORCHX_RANK0_HOST"}
    assert role.args[0] == macros.app_id


@pytest.mark.torchx
def test_describe_returns_what_was_submitted():
    role = make_role(args=["-c", "x"], env={"A": "1", "API_KEY": "k"}, num_replicas=2, min_replicas=1, max_retries=3)
    app = AppDef("app", roles=[role], metadata={"k": "v"})
    plan = roles.build_role_plan(role)
    assert plan.retry_scope is RetryScope.APPLICATION
    assert not plan.runs_agent
    spec = AppSpec(
        app_id="app-x", scheduler="local_cwd", folder="/f", driver="a:b", roles=(plan,), grace_s=1.0,
        description=dump_app(app),
    )  # fmt: skip
    state = SupervisedApp(
        replicas={
            ReplicaId("r", 0): ReplicaState(status=ReplicaStatus.FAILED),
            ReplicaId("r", 1): ReplicaState(status=ReplicaStatus.SUCCEEDED),
        },
        phase=AppPhase.ENDED,
        outcome=Outcome.FAILED,
        reasons=(Reason(code=Code.SCRIPT_SAID, text="because"),),
    )
    record = AppRecord(app=state, machine=Machine.here())
    words = supervised.AgentReports(jobs={"r": JobFacts(status=JobStatus(step=3))})
    facts = supervised.build_supervised_facts(spec, record, words)
    assert facts.jobs == words.jobs, "what its agents told last"
    response = build_status(facts)
    assert response.state.name == "FAILED"
    assert response.msg == "because"
    assert [status.state.name for status in response.roles_statuses[0].replicas] == ["FAILED", "SUCCEEDED"]
    again = response.roles[0]
    assert (again.args, again.num_replicas, again.max_retries) == (["-c", "x"], 2, 3)
    assert again.env == {"A": "1", "API_KEY": "***"}
    assert supervised.build_supervised_facts(spec, None, supervised.AgentReports()).state.name == "SUBMITTED"
    ending = replace(record, app=replace(state, phase=AppPhase.ENDING))
    assert build_status(supervised.build_supervised_facts(spec, ending, words)).msg.startswith("is ending: because; ")
