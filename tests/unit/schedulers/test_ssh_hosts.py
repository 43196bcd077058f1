"""Who the hosts are: lists, hostfiles of other launchers, discovery scripts; and what a request says of them."""

import io
import json
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import replace

import pytest
from torchx.specs import AppDef

from muster.schedulers.adapter import OptionError, SchedulerError
from muster.schedulers.node_program import keeper
from muster.schedulers.node_program.frames import STATE_NAME, FrameReader, Kind, pack
from muster.schedulers.ssh import scheduler as ssh_scheduler
from muster.schedulers.ssh.command import build_ssh, explain_failure
from muster.schedulers.ssh.driver import SshDriver
from muster.schedulers.ssh.hosts import Host, HostError, parse_host, parse_hostfile, run_discovery
from muster.schedulers.ssh.options import SshOptions, find_hosts
from muster.schedulers.ssh.request import build_request, place_request
from muster.schedulers.supervision.app_folder import AppFolder, AppRecord, AppSpec
from muster.schedulers.supervision.driver import EventQueue
from muster.schedulers.supervision.machine import Machine
from muster.schedulers.supervision.state import AppPhase, ReplicaId, ReplicaState, SupervisedApp
from muster.schedulers.wording.reasons import Code, Reason, to_data
from muster.testing.contract_apps import build_agents

HOSTFILE = """\
# of DeepSpeed
worker-1 slots=8
worker-2 slots=4 max_slots=8  # of Open MPI

worker-3:2
user@worker-4
[fe80::1%eth0]:3
"""


def test_a_hostfile_may_have_each_form() -> None:
    assert parse_hostfile(HOSTFILE, "hosts") == [
        Host("worker-1", 8),
        Host("worker-2", 4),
        Host("worker-3", 2),
        Host("user@worker-4"),
        Host("fe80::1%eth0", 3),
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\nb slots=x", "hosts, line 2: 'slots' is not slots=N"),
        ("a gpus=8", "hosts, line 1: 'gpus' is not slots=N"),
        ("-oProxyCommand=touch /tmp/x", "hosts, line 1: '-oProxyCommand=touch' is not HOST"),
        ("a:0", "'a:0' has no slots"),
    ],
)
def test_a_line_that_is_none_of_them_is_named(text, line) -> None:
    with pytest.raises(HostError, match=line):
        parse_hostfile(text, "hosts")


@pytest.mark.parametrize("word", ["", "a b", "-a", "a:b", "a,b", "user@", ":8"])
def test_a_word_that_is_no_host_is_refused(word) -> None:
    with pytest.raises(HostError):
        parse_host(word, "hosts")


def test_a_host_runs_one_node(tmp_path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.touch()
    for options, line in [
        ({"hosts": ["a", "a:4"]}, "twice"),
        ({"hostfile": str(hostfile)}, "names no host"),
        ({}, "none of them is given"),
        ({"hosts": ["a"], "hostfile": "x"}, "hosts and hostfile"),
    ]:
        with pytest.raises(OptionError, match=line):
            find_hosts(SshOptions(**options))


def test_a_discovery_script_that_is_not_there_is_a_line(tmp_path) -> None:
    with pytest.raises(HostError, match="No such file"):
        run_discovery(str(tmp_path / "none"))


def build(hosts, app=None, **options):
    chosen = SshOptions(**options)
    return build_request(app or build_agents("pass"), chosen, hosts, app_id="app-x", folder="/tmp/app-x", token="t0p")


def test_a_dry_run_tells_hosts_and_no_secret() -> None:
    shown = str(build([Host("a"), Host("b", 8)], env={"API_KEY": "do-not-tell", "SIZE": "9"}))
    assert "do-not-tell" not in shown
    assert "t0p" not in shown
    assert '"name": "b"' in shown
    assert '"SIZE": "9"' in shown


@pytest.mark.parametrize(
    ("hosts", "options", "line"),
    [
        ([Host("a")], {}, "2 nodes need as many hosts, and 1 is named"),
        ([Host("a"), Host("b")], {"spares": 1}, "2 nodes and 1 spare need as many hosts, and 2 are named"),
    ],
)
def test_too_few_hosts_are_refused(hosts, options, line) -> None:
    with pytest.raises(SchedulerError, match=line):
        build(hosts, **options)


def test_a_host_with_too_few_slots_is_refused() -> None:
    app = build_agents("pass")
    app = AppDef("x", roles=app.roles)
    app.roles[0].args[app.roles[0].args.index("--nproc-per-node") + 1] = "4"
    with pytest.raises(SchedulerError, match=r"4 processes .* 2 slots"):
        build([Host("a", 4), Host("b", 2)], app)


def test_each_replica_is_told_the_address_of_the_first() -> None:
    request, others = build([Host("a"), Host("b")]), {"a": "10.0.0.1", "b": "10.0.0.2"}
    spec = place_request(request, hosts=["a", "b"], addresses={"w": "10.0.0.1"}, ports={"w": 23456}, others=others)
    told = [plan["env"] for plan in spec.details["replicas"]["w"]]
    assert [env["TORCHX_RANK0_HOST"] for env in told] == ["10.0.0.1"] * 2
    assert [env["MUSTER_RDZV_PORT"] for env in told] == ["23456"] * 2
    assert spec.details["hosts"] == ["a", "b"]


def test_a_command_line_has_neither_program_nor_order() -> None:
    words = build_ssh(("ssh", "-p", "22"), "user@a", "/opt/my python")
    assert words[-2] == "user@a"
    assert words[-3] == "--"
    assert words[-1].startswith("exec '/opt/my python' -c ")


def test_why_a_connection_ended_is_one_line() -> None:
    warning = b"Warning: Permanently added 'a' (ED25519) to the list of known hosts.\n"
    refused = b"ssh: connect to host a port 22: Connection refused\n"
    assert explain_failure(warning + refused, 255, "python3") == "connect to host a port 22: Connection refused"
    assert explain_failure(b"sh: 1: exec: python9: not found", 127, "python9").startswith("no python9 there")
    assert explain_failure(b"", None, "python3") == "the connection ended"
    assert "with 255 and said" in explain_failure(b"", 255, "python3")


def test_the_supervisor_loads_no_torchx() -> None:
    program = "import sys, muster.schedulers.ssh.driver; sys.exit('torchx' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_frames_come_whole_however_they_are_cut() -> None:
    data = pack(b"1", b"out") + pack(b"X", b"0") + pack(b"H")
    reader = FrameReader()
    found = [frame for at in range(len(data)) for frame in reader.feed(data[at : at + 1])]
    assert found == [(b"1", b"out"), (b"X", b"0"), (b"H", b"")]


def build_driver(folder, *, retries=1, used=0, phase=AppPhase.RUNNING):
    """A driver of `w/0` on a and `w/1` on b, with the spare c, of which nothing runs."""
    addresses = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}
    request = build([Host(name) for name in addresses], build_agents("pass", retries=retries), spares=1)
    first = {"w": "10.0.0.1"}
    spec = place_request(request, hosts=list(addresses), addresses=first, ports={"w": 23456}, others=addresses)
    spec = replace(spec, folder=str(folder))
    AppFolder(folder).create(spec)
    replicas = {ReplicaId("w", index): ReplicaState() for index in range(2)}
    app = SupervisedApp(replicas=replicas, phase=phase, retries={"w": used})
    AppFolder(folder).write_record(AppRecord(app=app, machine=Machine.here()))
    return SshDriver(spec=spec, event_queue=EventQueue())


@pytest.mark.parametrize("index", [0, 1])
def test_a_node_that_leaves_is_replaced_on_a_spare(tmp_path, index) -> None:
    """With the code after which Docker starts another container, and Kubernetes another pod."""
    driver = build_driver(tmp_path / "app")
    assert driver.explain_end(ReplicaId("w", index), 69) == (69, (Reason(code=Code.MOVED, host="c"),))
    hosts = {each.index: host for each, host in driver._hosts.items()}
    assert hosts == {0: "a", 1: "b", index: "c"}
    assert driver._spares == ["ab"[index]], "the last spare"


@pytest.mark.parametrize(
    ("code", "more"),
    [(1, {}), (137, {}), (69, {"used": 1}), (69, {"retries": 0}), (69, {"phase": AppPhase.ENDING}), (255, {"used": 1})],
)
def test_a_replica_that_does_not_start_elsewhere_keeps_its_host(tmp_path, code, more) -> None:
    """One that is not started again must not move: the others would start again, to meet nobody."""
    driver = build_driver(tmp_path / "app", **more)
    folder = AppFolder(tmp_path / "app").replica_dir(ReplicaId("w", 0))
    folder.mkdir(parents=True)
    lost = Reason(code=Code.LINK_LOST, host="a", text="no route")
    (folder / STATE_NAME).write_text(json.dumps({"lost": [to_data(lost)]}))
    expected = (None, (lost,)) if code == 255 else (code, ())
    assert driver.explain_end(ReplicaId("w", 0), code) == expected
    assert list(driver._hosts.values()) == ["a", "b"]


def test_a_folder_that_is_not_there_yet_is_made(tmp_path) -> None:
    """The checks accept it: they look at the first folder above it that is there."""
    run = tmp_path / "not" / "there" / "muster-app" / "w-0-1"
    sent = io.BytesIO(pack(Kind.INPUT, b"12"))
    with pytest.raises(EOFError):
        keeper._start({"files": ["muster-agent.zip"]}, str(run), io.BufferedReader(sent))
    assert not run.exists()
    assert run.parents[1].is_dir()


def test_a_packed_workspace_has_no_name_that_a_kill_could_leave(tmp_path, monkeypatch):
    code, temporary = tmp_path / "code", tmp_path / "tmp"
    code.mkdir()
    temporary.mkdir()
    (code / "main.py").write_text("x")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    details = {"workspaces": {"a": str(code), "b": str(code)}}
    spec = AppSpec(app_id="x", scheduler="ssh", folder=str(tmp_path), driver="", roles=(), grace_s=5.0, details=details)
    with ssh_scheduler._pack_files(spec) as paths:
        assert list(temporary.iterdir()) == []
        for path in paths.values():
            with tarfile.open(path) as archive:
                assert "main.py" in [name.removeprefix("./") for name in archive.getnames()]
    assert len(paths) == 2
