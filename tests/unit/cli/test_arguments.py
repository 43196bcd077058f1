# ruff: noqa: E501 - the tables read better with one case a line
"""Command lines and environments to `AgentConfig`, in tables."""

import sys
from pathlib import Path
from typing import Any

import pytest

from muster import run
from muster._shared.contract import Env
from muster.agent.cli import arguments
from muster.agent.cli.arguments import parse_args
from muster.agent.cli.rendezvous_flags import parse_endpoint
from muster.agent.config import HANG_TIMEOUT_AUTO, AgentConfig, Std
from muster.agent.errors import UsageError
from muster.agent.workers.spec import Program, ProgramKind


def parse(words: str, **environ: str) -> AgentConfig:
    return parse_args([*words.split(), "train.py"], environ)


def refusal(words: str, **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(words, **environ)
    text = str(caught.value)
    assert "\n" not in text
    assert caught.value.exit_code == 2
    return text


# -- the program ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ([], ProgramKind.SCRIPT),
        (["-m"], ProgramKind.MODULE),
        (["--no-python"], ProgramKind.COMMAND),
        (["--run-path"], ProgramKind.RUN_PATH),
        (["--run-path", "--no-python", "-m"], ProgramKind.RUN_PATH),
    ],
)
def test_the_kind_of_program(words: list[str], kind: ProgramKind) -> None:
    config = parse_args([*words, "target", "--lr", "${local_rank}"], {})
    assert config.program == Program(kind=kind, target="target", args=("--lr", "${local_rank}"))


def test_another_interpreter_makes_the_script_a_command() -> None:
    assert parse("-m", PYTHON_EXEC="/opt/python").program == Program(
        kind=ProgramKind.COMMAND, target="/opt/python", args=("-u", "-m", "train.py")
    )
    assert parse("", PYTHON_EXEC=sys.executable).program.kind is ProgramKind.SCRIPT


def test_no_script_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no script"):
        parse_args(["--standalone"], {})


def test_help_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["--help"], {})
    assert caught.value.code == 0
    assert "--nproc-per-node" in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
@pytest.mark.parametrize("parse_words", [lambda words: parse_args(words, {}), run.parse_args])
def test_a_completion_ends_with_0(shell: str, parse_words: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_words(["--print-completion", shell])
    assert caught.value.code in (0, None)
    assert "nproc-per-node" in capsys.readouterr().out
    assert "--print-completion 'fish': " in refusal("--print-completion fish")


# -- defaults and single flags ----------------------------------------------------------------------------------------


def test_defaults_are_torchruns() -> None:
    config = parse("")
    assert config.nproc == 1
    assert (config.role, config.max_restarts, config.shutdown_timeout_s) == ("default", 0, 30.0)
    assert config.signals_to_handle == ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    assert (config.start, config.start_method, config.event_log_handler) == ("auto", "spawn", "null")
    assert config.logs.base_dir is None
    assert config.logs.redirects.of(0) is config.logs.tee.of(0) is Std.NONE
    assert config.logs.local_ranks_filter is None
    assert (config.hang_timeout_s, config.restart_backoff_s, config.numa_binding) == (HANG_TIMEOUT_AUTO, 1.0, None)
    assert not config.virtual_local_rank


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        ("--nproc-per-node 3", "nproc", 3),
        ("--role trainer", "role", "trainer"),
        ("--max-restarts 4", "max_restarts", 4),
        ("--max-restarts 4", "rendezvous.max_restarts", 4),
        ("--restart-backoff 0.5", "restart_backoff_s", 0.5),
        ("--shutdown-timeout 3", "shutdown_timeout_s", 3.0),
        ("--shutdown-timeout 0", "shutdown_timeout_s", 0.0),
        ("--signals-to-handle SIGTERM,SIGUSR1", "signals_to_handle", ("SIGTERM", "SIGUSR1")),
        ("--preempt-signal USR1", "preempt_signal", "SIGUSR1"),
        ("--interrupt-action ask", "asks_at_interrupt", True),
        ("--interrupt-action stop", "asks_at_interrupt", False),
        ("--preempt-signal sighup", "preempt_signal", "SIGHUP"),
        ("--hang-timeout auto", "hang_timeout_s", HANG_TIMEOUT_AUTO),
        ("--hang-timeout 60", "hang_timeout_s", 60.0),
        ("--hang-timeout 0", "hang_timeout_s", None),
        ("--event-log-handler console", "event_log_handler", "console"),
        ("--numa-binding core-complex", "numa_binding", "core-complex"),
        ("--virtual-local-rank", "virtual_local_rank", True),
        ("--start cold", "start", "cold"),
        ("--start fork", "start_method", "fork"),
        ("--start fork", "start", "auto"),
        ("--start-method forkserver", "start_method", "forkserver"),
        ("--preload torch,numpy", "preload", "torch,numpy"),
        ("--log-dir /var/log/x", "logs.base_dir", "/var/log/x"),
        ("--local-ranks-filter 0,12", "logs.local_ranks_filter", frozenset({0, 12})),
        ("--duplicate-stdout-filters a,,b,c", "logs.duplicate_stdout_filters", ("a,b", "c")),
        ("--duplicate-stderr-filters x", "logs.duplicate_stderr_filters", ("x",)),
        ("--logs-specs default", "logs.logs_specs", None),
    ],
)
def test_one_flag(words: str, path: str, value: object) -> None:
    found: Any = parse(words)
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


@pytest.mark.parametrize(
    ("words", "streams"),
    [
        ("--tee 3", {0: Std.ALL, 11: Std.ALL}),
        ("-t 1", {0: Std.OUT}),
        ("-t 0:3,10:2,1:0", {0: Std.ALL, 1: Std.NONE, 2: Std.NONE, 10: Std.ERR}),
    ],
)
def test_streams_by_rank(words: str, streams: dict[int, Std]) -> None:
    tee = parse(words).logs.tee
    assert {rank: tee.of(rank) for rank in streams} == streams


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--nnodes 0", "--nnodes '0': must be N or MIN:MAX"),
        ("--nnodes=", "--nnodes '': must be N or MIN:MAX"),
        ("--nnodes 3:2", "--nnodes '3:2': must be"),
        ("--nnodes 1:2:3", "--nnodes '1:2:3': must be"),
        ("--nnodes 1:٢", "--nnodes '1:٢': must be N or MIN:MAX"),
        ("--nnodes 16385", "--nnodes '16385': must be N or MIN:MAX, with 1 <= MIN <= MAX <= 16384"),
        ("--nproc-per-node ٢", "--nproc-per-node '٢': must be 1 to 16384"),
        ("--max-restarts ٢", "--max-restarts '٢': must be a whole number"),
        ("--max-restarts 1_0", "--max-restarts '1_0': must be a whole number"),
        (f"--max-restarts {'9' * 5000}", "must be a whole number"),
        ("--shutdown-timeout 1e300", "must be a number of seconds, 0 or more, at most"),
        ("--hang-timeout ٢", "--hang-timeout '٢': must be auto"),
        ("--tee ٢:1", "--tee '٢:1': must be"),
        ("--local-ranks-filter ٢", "--local-ranks-filter '٢': must be"),
        ("--nnodes 2 --rdzv-endpoint h:٢ --rdzv-backend c10d", "the port must be a number"),
        ("--node-rank 1", "--node-rank 1: must be 0 to 0 with --nnodes 1"),
        ("--node-rank 65536", "--node-rank '65536': must be a whole number, at least 0 and at most 16383"),
        ("--rdzv-id \udcff", r"--rdzv-id '\udcff': must be UTF-8 text"),
        ("--rdzv-id a\x1b", r"--rdzv-id 'a\x1b': must be UTF-8 text without control characters"),
        ("--role a\x1b", r"--role 'a\x1b': must be UTF-8 text without control characters"),
        ("--nnodes 2 --master-addr \udcff", r"--master-addr '\udcff': must be UTF-8 text"),
        ("--nproc-per-node 0", "--nproc-per-node '0': must be 1 to 16384"),
        (f"--nproc-per-node {'9' * 300}", "must be 1 to 16384"),
        ("--max-restarts -1", "--max-restarts '-1': must be a whole number, at least 0"),
        ("--max-restarts x", "--max-restarts 'x': must be a whole number"),
        ("--shutdown-timeout inf", "--shutdown-timeout 'inf': must be a number of seconds"),
        ("--hang-timeout -1", "--hang-timeout '-1': must be auto, or a number of seconds, 0 or more"),
        ("--start tepid", "--start 'tepid': must be one of auto, cold, warm"),
        ("--start-method vfork", "--start-method 'vfork': must be one of spawn, fork, forkserver"),
        ("--no-python -m", "--no-python and --module contradict each other"),
        ("--no-python --start warm", "--start warm forks Python workers"),
        ("--tee 4", "--tee '4': must be 0 (none)"),
        ("--redirects 0:3,x:1", "--redirects '0:3,x:1': must be"),
        ("--local-ranks-filter 0,a", "--local-ranks-filter '0,a': must be local ranks"),
        ("--signals-to-handle SIGTERM,SIGFOO", "not SIGFOO"),
        ("--signals-to-handle SIGKILL", "not SIGKILL"),
        ("--interrupt-action kill", "must be one of stop, ask"),
        ("--interrupt-action ask --signals-to-handle SIGTERM", "--signals-to-handle must have SIGINT"),
        ("--collapse-lines sometimes", "--collapse-lines 'sometimes': must be one of "),
        ("--collapse-lines=", "--collapse-lines '': must be one of "),
        ("--preempt-signal SIGUSR2", "one of SIGUSR1, SIGHUP, SIGQUIT, SIGTERM, not SIGUSR2"),
        ("--event-log-handler tty", "--event-log-handler 'tty': must be one of null, console"),
        ("--logs-specs unknown", "--logs-specs 'unknown': must be one of default"),
        ("--numa-binding core", "--numa-binding 'core': must be one of node, socket, exclusive, core-complex"),
        ("--rdzv-backend zookeeper", "--rdzv-backend 'zookeeper': must be one of muster, c10d, static"),
        ("--master-port 70000", "--master-port '70000': must be a whole number, at least 0 and at most 65535"),
        ("--nnodes 2 --node-rank 2", "--node-rank 2: must be 0 to 1"),
        ("--nnodes 2 --node-rank -1", "--node-rank '-1': must be a whole number, at least 0"),
        ("--standalone --nnodes 2", "--standalone is one node, but --nnodes is '2'"),
        ("--rdzv-backend c10d --rdzv-conf colour=red", "--rdzv-conf: unknown key 'colour'; the keys are join_timeout"),
        ("--rdzv-backend c10d --rdzv-conf join_timeout", "must be KEY=VALUE"),
        ("--rdzv-backend c10d --rdzv-conf 'join_timeout=5", 'unknown key "\'join_timeout"; the keys are join_timeout'),
        ("--rdzv-conf foo=3", "--rdzv-conf: unknown key 'foo'; the keys are join_timeout, timeout,"),
        ("--rdzv-backend c10d --rdzv-conf join_timeout=soon", "join_timeout=soon: must be a number of seconds"),
        ("--rdzv-backend c10d --rdzv-conf keep_alive_max_attempt=0", "keep_alive_max_attempt=0: must be"),
        ("--rdzv-backend c10d --rdzv-conf is_host=maybe", "is_host=maybe: must be one of 1, true"),
        ("--rdzv-backend c10d --rdzv-conf store_type=file", "store_type=file: must be tcp"),
        ("--rdzv-backend c10d --nnodes 2 --rdzv-endpoint h:99999", "the port must be a number from 0 to 65535"),
        ("--rdzv-backend c10d --nnodes 2 --rdzv-endpoint a:b:c", "an IPv6 address in brackets"),
        ("--rdzv-backend static --rdzv-endpoint host", "static needs HOST:PORT"),
        ("--nnodes 2 --rdzv-backend c10d-torch --rdzv-endpoint h:0", "h:0: the port must be 1 to 65535 with more"),
        ("--nnodes 2 --master-port 0", "127.0.0.1:0: the port must be 1 to 65535 with more than one node"),
        (
            "--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint h:0",
            "h:0: the port must be 1 to 65535 with more than one node",
        ),
        ("--nnodes 2 --rdzv-conf is_host=perhaps", "is_host=perhaps: must be"),
        ("--rank0-env R0 --rdzv-endpoint h:1", "--rank0-env and --rdzv-endpoint both give the leader's address"),
        ("--rdzv-id= --nnodes 2", "--rdzv-id '': must be a name"),
        ("--nproc-per-node=", "--nproc-per-node '': must be 1 to 16384, or auto, cpu, gpu"),
    ],
)
def test_what_is_refused(words: str, message: str) -> None:
    assert message in refusal(words)


def test_an_error_names_the_variable_that_holds_the_value() -> None:
    assert refusal("", PET_MAX_RESTARTS="many").startswith("PET_MAX_RESTARTS 'many'")
    assert refusal("", PET_STANDALONE="yes").startswith("PET_STANDALONE 'yes': ")
    assert refusal("", PET_START_METHOD="vfork").startswith("PET_START_METHOD 'vfork'")
    assert refusal("--max-restarts x", PET_MAX_RESTARTS="2").startswith("--max-restarts 'x'")


def test_an_empty_variable_is_none() -> None:
    empty = dict.fromkeys(("PET_NNODES", "PET_NPROC_PER_NODE", "PET_MAX_RESTARTS", "PET_STANDALONE", "PET_TEE"), "")
    config = parse("", **empty)
    assert (config.nproc, config.max_restarts, config.rendezvous.max_nodes) == (1, 0, 1)


def test_a_log_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    assert "not a file" in refusal(f"--log-dir {tmp_path / 'f'}")
    assert parse("--log-dir /dev/null").logs.base_dir == "/dev/null"


# -- rendezvous -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {"backend": "muster", "standalone": True, "host": None, "min_nodes": 1, "max_nodes": 1}),
        ("--standalone", {"backend": "muster", "standalone": True, "node_index": 0}),
        ("--standalone --rdzv-id mine", {"run_id": "mine"}),
        ("--standalone --nnodes 1:4", {"standalone": True, "max_nodes": 1}),
        ("--node-rank 0", {"standalone": True}),
        ("--standalone --node-rank 3", {"standalone": True, "node_index": 3}),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:1 --node-rank 3", {"node_index": 3}),  # a spare
        ("--master-port 1234", {"backend": "static", "standalone": False, "master_port": 1234}),
        ("--master-port 0", {"standalone": True}),
        ("--rdzv-endpoint localhost:0", {"standalone": True}),
        ("--nnodes 2 --node-rank 1 --master-addr h", {"backend": "static", "node_index": 1, "master_addr": "h"}),
        ("--nnodes 2 --master-addr [::1] --local-addr [::1]", {"master_addr": "::1", "local_addr": "::1"}),
        ("--nnodes 2", {"backend": "static", "node_index": 0, "master_addr": "127.0.0.1", "master_port": 29500}),
        ("--nnodes 2", {"join_timeout_s": 900.0, "run_id": "none"}),
        ("--nnodes 2 --rdzv-conf timeout=9", {"backend": "static", "join_timeout_s": 9.0}),
        ("--nnodes 1:3 --rdzv-backend static", {"backend": "static", "min_nodes": 3, "max_nodes": 3, "standalone": False}),
        ("--nnodes 2 --node-rank 1 --rdzv-conf is_host=1", {"backend": "static", "is_host": None}),
        ("--rdzv-endpoint h:7", {"backend": "static", "master_addr": "h", "master_port": 7}),
        (
            "--nnodes 2 --rdzv-backend c10d",
            {"backend": "muster", "host": "localhost", "port": 29400, "node_index": None, "run_id": "none"},
        ),
        ("--nnodes 1:3 --rdzv-backend c10d --rdzv-endpoint h", {"host": "h", "port": 29400, "min_nodes": 1, "max_nodes": 3}),
        ("--nnodes 2 --rdzv-backend muster --rdzv-endpoint [::1]:5 --node-rank 1", {"host": "::1", "port": 5, "node_index": 1}),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h --rdzv-port 6", {"host": "h", "port": 6}),
        ("--nnodes 2 --rank0-env R0 --node-rank 1", {"backend": "muster", "host": "node0", "port": 29400}),
        ("--nnodes 2 --rank0-env R0 --rdzv-port 3 --rdzv-backend c10d", {"backend": "muster", "port": 3}),
        ("--nnodes 2 --rank0-env R0 --rdzv-backend static --rdzv-port 8", {"backend": "static", "master_addr": "node0", "master_port": 8}),
        ("--rank0-env R0 --rdzv-id app", {"backend": "muster", "standalone": True, "run_id": "app", "host": "node0"}),
        ("--rdzv-backend etcd --rdzv-endpoint e:1 --rdzv-conf a=b", {"backend": "etcd", "endpoint": "e:1", "conf": {"a": "b"}}),
        ("--nnodes 2 --rdzv-backend c10d-torch --rank0-env R0 --rdzv-port 4", {"backend": "c10d-torch", "endpoint": "node0:4"}),
        ("--rdzv-backend etcd-v2", {"backend": "etcd-v2", "endpoint": ""}),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-conf join_timeout=7,last_call_timeout=0", {"join_timeout_s": 7.0, "last_call_timeout_s": 0.0}),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-conf keep_alive_interval=2,keep_alive_max_attempt=9", {"keep_alive_interval_s": 2.0, "keep_alive_max_attempt": 9}),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-conf is_host=True", {"is_host": True}),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-conf is_host=0", {"is_host": False}),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-conf read_timeout=60,close_timeout=1,heartbeat_timeout=2,cas_backoff_max_seconds=1,store_type=tcp", {"is_host": None}),
        ("--nnodes 2 --rdzv-backend c10d --last-call-timeout 5 --rdzv-conf last_call_timeout=6", {"last_call_timeout_s": 5.0}),
        ("--local-addr 10.0.0.7", {"local_addr": "10.0.0.7"}),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-conf 'join_timeout=5,timeout=6'", {"join_timeout_s": 5.0}),
        ('--nnodes 2 --rdzv-backend c10d --rdzv-conf "keep_alive_interval=2"', {"keep_alive_interval_s": 2.0}),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-conf ''", {"join_timeout_s": 600.0}),
    ],
)  # fmt: skip
def test_rendezvous_configuration(words: str, expected: dict[str, object]) -> None:
    config = parse(words, R0="node0").rendezvous
    assert {name: getattr(config, name) for name in expected} == expected


def test_a_standalone_run_gets_a_fresh_id() -> None:
    assert parse("--standalone").rendezvous.run_id != parse("--standalone").rendezvous.run_id


def test_what_people_read_has_the_names_and_the_width_of_the_adapter() -> None:
    own, adapters = parse("--role main"), parse("--role trainer-of-images --nnodes 2", **{Env.ADAPTER: "a"})
    assert (own.rendezvous.max_restarts_flag, own.report_columns) == ("--max-restarts", 70)
    assert own.sigterm_senders == "`kill`, `timeout` or a scheduler"
    assert [parse("", **{Env.SIGTERM_SENDERS: text}).sigterm_senders for text in ("`scancel`", "")] == ["`scancel`", ""]
    by_hand = parse("", SLURM_JOB_ID="7", SLURMD_NODENAME="n2")
    assert (by_hand.sigterm_senders, by_hand.node_name) == ("`kill`, `timeout` or Slurm: see `sacct -j 7`", "n2")
    assert parse("", **{Env.CONTROL_FD: "3"}).sigterm_senders == "the program that has started the job"
    assert adapters.rendezvous.max_restarts_flag == "--max_retries"
    assert adapters.report_columns == 80 - len("trainer-of-images/1 ")
    assert parse(f"--role {'r' * 60}", **{Env.ADAPTER: "a"}).report_columns == 40


@pytest.mark.parametrize("nnodes", ["1", "2", "1:2"])
@pytest.mark.parametrize(
    ("backend", "port"),
    [("c10d", 41), ("muster", 41), ("static", 3), ("c10d-torch", 3), ("etcd", 3), ("etcd-v2", 3)],
)
def test_the_adapters_port_is_for_our_leader_only(backend: str, port: int, nnodes: str) -> None:
    words = f"--nnodes {nnodes} --rank0-env R0 --rdzv-backend {backend} --rdzv-port 3 --node-rank 0"
    config = parse(words, R0="node0", **{Env.RDZV_PORT: "41"}).rendezvous
    if config.endpoint:
        assert config.endpoint == f"node0:{port}"
    elif backend == "static":
        assert (config.master_addr, config.master_port) == ("node0", port)
    else:
        assert config.standalone or (config.host, config.port) == ("node0", port)


def test_the_adapters_port_beats_the_flag_but_not_an_endpoint() -> None:
    variables = {Env.RDZV_PORT: "41", "R0": "node0"}
    assert parse("--nnodes 2 --rank0-env R0 --rdzv-port 3", **variables).rendezvous.port == 41
    assert parse("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:5", **variables).rendezvous.port == 5
    assert Env.RDZV_PORT in refusal("--nnodes 2 --rank0-env R0", **{Env.RDZV_PORT: "x", "R0": "h"})


def test_flags_beat_variables_that_name_another_leader() -> None:
    config = parse("--nnodes 2 --rank0-env R0", PET_RDZV_ENDPOINT="other:1", R0="node0").rendezvous
    assert (config.host, config.port) == ("node0", 29400)


@pytest.mark.parametrize("value", [{}, {"R0": ""}, {"R0": "  "}])
def test_an_unset_rank0_variable_is_named_except_on_node_0(value: dict[str, str]) -> None:
    text = refusal("--nnodes 2 --rank0-env R0 --node-rank 1", **value)
    assert text.startswith("--rank0-env R0: ")
    assert "index 1" in text
    assert "--node-rank is not given" in refusal("--nnodes 2 --rank0-env R0", **value)
    assert parse("--nnodes 2 --rank0-env R0 --node-rank 0", **value).rendezvous.host


def test_the_adapters_last_call_is_a_default_only() -> None:
    variables = {Env.LAST_CALL_S: "30"}
    words = "--nnodes 1:2 --rdzv-backend c10d"
    assert parse(words, **variables).rendezvous.last_call_timeout_s == 30.0
    assert parse(f"{words} --rdzv-conf last_call_timeout=4", **variables).rendezvous.last_call_timeout_s == 4.0
    assert parse(f"{words} --last-call-timeout 2", **variables).rendezvous.last_call_timeout_s == 2.0
    assert parse(words).rendezvous.last_call_timeout_s == 3.0
    assert Env.LAST_CALL_S in refusal(words, **{Env.LAST_CALL_S: "soon"})


def test_a_node_that_is_started_again_is_told_so() -> None:
    words = "--nnodes 1:2 --rdzv-backend c10d"
    assert parse(words, **{Env.INCARNATION: "3"}).rendezvous.incarnation == 3
    assert parse(words).rendezvous.incarnation == parse(words, **{Env.INCARNATION: ""}).rendezvous.incarnation == 0
    assert Env.INCARNATION in refusal(words, **{Env.INCARNATION: "-1"})
    assert Env.INCARNATION not in parse(words, **{Env.INCARNATION: "3"}).base_env


def test_the_stop_limit_is_the_grace_and_the_limit_after_the_kill() -> None:
    variable = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
    assert parse("--nnodes 2 --rdzv-backend c10d").rendezvous.stop_limit_s == 60.0
    words = "--nnodes 2 --rdzv-backend c10d --shutdown-timeout 5"
    assert parse(words, **{variable: "7"}).rendezvous.stop_limit_s == 12.0
    assert variable in refusal(words, **{variable: "soon"})


@pytest.mark.parametrize("token", [{}, {Env.TOKEN: ""}])
def test_a_required_token_that_is_missing_is_refused(token: dict[str, str]) -> None:
    assert f"requires a token, but {Env.TOKEN} " in refusal("", **{Env.REQUIRE_TOKEN: "1"}, **token)


def test_the_token_is_read_and_never_shown() -> None:
    token = "0123456789abcdef" * 4
    config = parse("", **{Env.REQUIRE_TOKEN: "1", Env.TOKEN: token})
    assert config.rendezvous.token == token
    assert token not in repr(config)


@pytest.mark.parametrize(
    ("token", "has", "least"),
    [
        ("secret", "6", "22 characters"),
        ("correct-horse-battery", "21", "22 characters"),
        ("0123456789abcdef" * 2, "", ""),
        ("0123456789ABCDEF0123456789abcde", "31", "32 hexadecimal digits"),
        ("1234567890" * 3, "30", "39 decimal digits"),
        ("zF3kQ0v9_xT7-mB2LwYd8A", "", ""),
    ],
)
def test_a_token_that_can_be_guessed_is_refused(token: str, has: str, least: str) -> None:
    """Its MAC, which a peer gets once in a handshake, is enough to try words."""
    if not has:
        assert parse("", **{Env.TOKEN: token}).rendezvous.token == token
        return
    assert refusal("", **{Env.TOKEN: token}) == (
        f"MUSTER_TOKEN can be guessed: it must have 128 random bits, which is {least} or more, not {has}; make one with "
        "`openssl rand -hex 32`"
    )


def test_an_inherited_socket() -> None:
    assert parse("", **{Env.RDZV_FD: "7"}).rendezvous.listen_fd == 7
    assert Env.RDZV_FD in refusal("", **{Env.RDZV_FD: "seven"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("h", ("h", 9)), ("h:1", ("h", 1)), (" h:0 ", ("h", 0)), ("[::1]", ("::1", 9)), ("[fe80::1]:2", ("fe80::1", 2))],
)
def test_endpoints(text: str, expected: tuple[str, int]) -> None:
    assert parse_endpoint(text, default_port=9, origin="--x") == expected


# -- the environment --------------------------------------------------------------------------------------------------


def test_workers_inherit_everything_but_our_secrets() -> None:
    environ = {**dict.fromkeys(Env.PRIVATE, "1"), Env.TOKEN: "1" * 39}
    environ |= {"HOME": "/h", "PET_NNODES": "1", Env.RANK0_HOST: "h"}
    config = parse("", **environ)
    assert config.base_env == {"HOME": "/h", "PET_NNODES": "1", Env.RANK0_HOST: "h"}


def test_other_variables() -> None:
    config = parse(
        "",
        TORCHELASTIC_ERROR_FILE="/e.json",
        TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="[${rank}]:",
        TORCH_ELASTIC_SHUTDOWN_TIMEOUT="4",
        **{Env.NODE_NAME: "pod-3", Env.TERMINATION_LOG: "/t", Env.LOG_DIR: "/l"},
    )
    assert (config.agent_error_file, config.logs.prefix_template) == ("/e.json", "[${rank}]:")
    both = parse(
        "--log-line-prefix-template a", TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="b", PET_LOG_LINE_PREFIX_TEMPLATE="c"
    )
    assert both.logs.prefix_template == "a"
    assert (config.node_name, config.termination_log, config.logs.base_dir) == ("pod-3", "/t", "/l")
    assert config.shutdown_timeout_s == 4.0
    assert parse("--shutdown-timeout 9", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="4").shutdown_timeout_s == 9.0
    assert parse("--log-dir /mine", **{Env.LOG_DIR: "/l"}).logs.base_dir == "/mine"
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT 'x'" in refusal("", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="x")
    assert parse("").node_name
    assert config.is_pod, "no adapter has submitted it"
    assert parse("", **{Env.TERMINATION_LOG: ""}).termination_log is None


@pytest.mark.parametrize(
    ("environ", "is_pod"),
    [
        ({}, True),
        ({Env.ADAPTER: "a"}, False),
        ({Env.ADAPTER: "a", Env.TERMINATION_LOG: "/dev/termination-log"}, True),
    ],
)
def test_kubernetes_reads_the_termination_log_of_a_pod_unless_another_adapter_has_started_the_agent(
    environ: dict[str, str], is_pod: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.path.exists", lambda path: path == "/dev/termination-log")
    config = parse("", **environ)
    assert (config.is_pod, config.termination_log) == (is_pod, "/dev/termination-log" if is_pod else None)


def test_threads_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "count_usable_cores", lambda: 12)
    assert parse("--nproc-per-node 4").omp_num_threads == 3
    assert parse("--nproc-per-node 32").omp_num_threads == 1
    assert parse("--nproc-per-node 1").omp_num_threads is None
    assert parse("--nproc-per-node 4", OMP_NUM_THREADS="7").omp_num_threads is None
    assert parse("--nproc-per-node 4", MUSTER_IMAGE="7:3").omp_num_threads is None


def test_an_order_of_ranks_needs_our_own_rendezvous() -> None:
    assert "--rank-order 'rack'" in refusal("--rank-order rack")
    words = "--nnodes 2 --rank-order segment --rdzv-backend etcd-v2 --rdzv-endpoint h:1"
    assert "--rank-order segment needs" in refusal(words)


def test_more_workers_than_visible_devices() -> None:
    message = refusal("--nproc-per-node 2 --virtual-local-rank", CUDA_VISIBLE_DEVICES="5")
    assert "CUDA_VISIBLE_DEVICES='5' names 1" in message


def test_restart_backoff() -> None:
    assert parse("--restart-backoff 0.5").restart_backoff_s == 0.5
    assert parse("--restart-backoff 0").restart_backoff_s == 0.0
    assert parse("").restart_backoff_s == 1.0
