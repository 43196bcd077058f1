"""`muster exec` and `muster shell`: their words, which nodes are meant, and what is found on a node."""

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from other_user import OTHER, needs_two_users
from torchx.specs import AppDef, AppState, Role
from torchx.specs.api import ReplicaStatus

from muster._shared.control import CommandExit, ControlError
from muster.cli.commands import build_parser
from muster.cli.exec_command import find_targets
from muster.schedulers.docker.sdk import InsideStream
from muster.schedulers.errors import UnknownAppError
from muster.schedulers.node_program import agents, served, session
from muster.schedulers.node_program.frames import MAGIC, Channel, Kind, NodeError, pack
from muster.schedulers.node_program.pipe import NodePipe, pump_pipe, start_pipe
from muster.schedulers.node_program.served import Served
from muster.schedulers.node_program.session import WORDS, Order, Session, build_program, run_captured
from muster.schedulers.wording.facts import AppFacts
from muster.schedulers.wording.reasons import Code, Reason

WHY = (Reason(code=Code.FOREIGN_TEXT, text="why"),)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("exec app --node 1 ls -l", ("app", 1, False, None, ["ls", "-l"])),
        ("exec --node=1 app ls --node 2", ("app", 1, False, None, ["ls", "--node", "2"])),
        ("exec app --all --role r sh -c x", ("app", None, True, "r", ["sh", "-c", "x"])),
        ("exec --nod 1 app --ro r ls -l", ("app", 1, False, "r", ["ls", "-l"])),
        ("exec app -- --all", ("app", None, False, None, ["--all"])),
        ("exec app", ("app", None, False, None, [])),
    ],
)
def test_options_stand_before_the_command(words: str, found: tuple[object, ...]) -> None:
    args = build_parser().parse_args(words.split())
    told = [word for word in args.words if word != "--"]  # which Python leaves there differs by its version
    assert (args.handle, args.node, args.takes_all, args.role, told) == found


@pytest.mark.parametrize("words", ["exec app --all --node 1 ls", "exec app --node x ls", "shell app x", "exec --nod"])
def test_wrong_words_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        build_parser().parse_args(words.split())
    assert error.value.code == 2
    assert capsys.readouterr().err


def build_facts(
    states: Sequence[AppState], *, state: AppState = AppState.RUNNING, names: Sequence[str] = ("r",)
) -> Any:
    args = ["-m", "muster.agent", "--nnodes", "2", "main.py"]
    roles = [Role(name=name, image="", entrypoint="python3", args=args) for name in names]
    replicas = [
        ReplicaStatus(id=index, role=name, state=each, hostname="")
        for name in names
        for index, each in enumerate(states)
    ]
    facts = AppFacts(
        app_id="app",
        app=AppDef("app", roles=roles),
        state=state,
        replicas=replicas,
        reasons=(Reason(code=Code.FOREIGN_TEXT, text="why"),),
    )
    return SimpleNamespace(backend="b", read_facts=lambda app_id: facts)


def find(scheduler: Any, **more: Any) -> list[str]:
    return [
        str(each) for each in find_targets(scheduler, "app", **{"role": None, "node": None, "takes_all": False, **more})
    ]


def test_which_nodes_are_meant() -> None:
    facts = build_facts([AppState.RUNNING, AppState.FAILED, AppState.RUNNING, AppState.CANCELLED])
    assert find(facts) == ["r/0"]
    assert find(facts, node=2) == ["r/2"]
    assert find(facts, takes_all=True) == ["r/0", "r/1", "r/2"], "an elastic job has three now"
    two = build_facts([AppState.RUNNING], names=("a", "b"))
    assert find(two, takes_all=True) == ["a/0", "b/0"]
    assert find(two, role="b") == ["b/0"]


@pytest.mark.parametrize(
    ("scheduler", "more", "line", "code"),
    [
        (
            build_facts([AppState.RUNNING]),
            {"node": 1},
            "no node 1 of app runs: it has 1 node, counted from 0",
            CommandExit.REFUSED,
        ),
        (
            build_facts([]),
            {"takes_all": True},
            "no node of app runs: it has 0 nodes, counted from 0",
            CommandExit.REFUSED,
        ),
        (
            build_facts([AppState.FAILED]),
            {},
            "no node 0 of app runs: it has 1 node, counted from 0",
            CommandExit.REFUSED,
        ),
        (build_facts([], state=AppState.FAILED), {}, "app is FAILED: why: nothing was changed", CommandExit.ENDED),
        (build_facts([], state=AppState.PENDING), {}, "app is PENDING: why: nothing was changed", CommandExit.REFUSED),
        (
            build_facts([AppState.RUNNING], names=("a", "b")),
            {},
            "app has several roles: name one with --role: a, b",
            CommandExit.USAGE,
        ),
        (
            build_facts([AppState.RUNNING]),
            {"role": "x"},
            "app has no role 'x' that runs agents; there is: r",
            CommandExit.USAGE,
        ),
        (
            build_facts([AppState.RUNNING], names=()),
            {},
            "app runs no agents of muster",
            CommandExit.USAGE,
        ),
    ],
)
def test_nodes_that_cannot_be_meant(scheduler: Any, more: dict[str, Any], line: str, code: CommandExit) -> None:
    with pytest.raises(ControlError) as error:
        find(scheduler, **more)
    assert (str(error.value), error.value.exit_code) == (line, code)


def test_an_app_that_is_not_known_has_no_nodes() -> None:
    with pytest.raises(UnknownAppError):
        find(SimpleNamespace(read_facts=lambda app_id: None))


# -- on the node -------------------------------------------------------------------------------------------------------


def start_agent(user: int | None = None, **env: str) -> "subprocess.Popen[bytes]":
    """A process that looks like the agent of node 1."""
    return subprocess.Popen(
        ["/bin/sh", "-c", "read line; exit 0", "sh", "--node-rank", "1"], env=env, user=user, stdin=subprocess.PIPE
    )


@pytest.fixture
def agent() -> Iterator[Any]:
    started = []

    def start(user: int | None = None, **env: str) -> Any:
        started.append(start_agent(user, **env))
        return started[-1]

    yield start
    for each in started:
        each.communicate()


VARIABLES = {"MUSTER_APP_ID": f"app-{os.getpid()}", "MUSTER_TOKEN": "secret", "MINE": "1", "MUSTER_WATCHED": "1"}
APP = VARIABLES["MUSTER_APP_ID"]


def test_an_agent_is_found_by_its_app_and_its_node(agent: Any) -> None:
    process = agent(**VARIABLES)
    assert agents.find_agent(APP, 1, 0) == process.pid
    assert agents.find_agent(APP, 1, process.pid) == process.pid
    assert agents.build_environment(process.pid).items() >= {"MUSTER_APP_ID": APP, "MINE": "1"}.items()
    assert not agents.build_environment(process.pid).keys() & {"MUSTER_TOKEN", "MUSTER_WATCHED"}
    other = agent()
    for app, index, root in ((APP, 0, 0), ("other", 1, 0), (APP, 1, other.pid)):
        with pytest.raises(NodeError, match="no agent of"):
            agents.find_agent(app, index, root)


@needs_two_users
def test_an_agent_of_another_user_is_refused(agent: Any) -> None:
    process = agent(user=OTHER, **VARIABLES)
    with pytest.raises(NodeError, match=f"uid {OTHER}, .* uid 0"):
        agents.find_agent(APP, 1, process.pid)
    with pytest.raises(NodeError, match="no agent of"):
        agents.find_agent(APP, 1, 0)


def test_the_shell_is_the_users_if_it_is_there() -> None:
    assert agents.choose_shell({"SHELL": "/bin/sh", "PATH": "/bin"}) == "/bin/sh"
    assert agents.choose_shell({"SHELL": "/no/such", "PATH": "/bin"}) == "/bin/bash"
    assert agents.choose_shell({"PATH": "/no/such"}) == "/bin/sh"


@pytest.mark.parametrize("sent", ["command", "held_run", "keeper"])
def test_a_program_on_a_node_needs_nothing_there(sent: str) -> None:
    text = build_program(sent, "print(pack(b'1', b'out'))")
    done = subprocess.run([sys.executable, "-I", "-S", "-c", text], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"b'1\\x00\\x00\\x00\\x03out\\n'\n", b"")


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Leave no number below 1,100: `select` takes none above 1,023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for fd in opened:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_a_command_runs_on_a_node_from_a_process_with_many_descriptors(agent: Any) -> None:
    agent(**VARIABLES)
    pipe = start_pipe([sys.executable, *WORDS], {**os.environ})
    order = Order(app=APP, index=1, command=["sh", "-c", "echo $MINE; cat >&2; exit 3"])
    assert run_captured(pipe, order, 60.0) == (3, "1\n", "")


def test_a_node_whose_command_prints_all_the_time_hears_of_this_side(
    agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was sent while something came, so the node ended a command that printed for 40 s."""
    agent(**VARIABLES)
    sent: list[bytes] = []
    send = Session.send
    monkeypatch.setattr(session, "ALIVE_S", 0.1)
    monkeypatch.setattr(Session, "send", lambda self, *frame: (sent.append(frame[0]), send(self, *frame)))
    prints = "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do echo; sleep 0.03; done"
    pipe = start_pipe([sys.executable, *WORDS], {**os.environ})
    run_captured(pipe, Order(app=APP, index=1, command=["sh", "-c", prints]), 60.0)
    assert sent.count(Kind.ALIVE) > 1


class Stuck(Served):
    """A command whose output never ends, and that cannot be killed."""

    kills = 0

    def list_sources(self) -> dict[int, int]:
        return {}

    def act(self, ready: Any) -> None:
        """Nothing is ready."""

    def has_output(self) -> bool:
        return True

    def send_signal(self, name: str) -> None:
        """It ignores all."""

    def kill(self) -> None:
        self.kills += 1


def test_what_cannot_be_killed_does_not_keep_a_program_whose_other_side_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served, "open_wake_pipe", lambda _signums: os.open(os.devnull, os.O_RDONLY))
    for name in ("_GRACE_S", "_KILL_LIMIT_S", "_LOOK_S"):
        monkeypatch.setattr(served, name, 0.05)
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        stuck = Stuck(Channel(ours.fileno(), ours.fileno()), [])
        stuck.run()
    os.close(stuck._wake)
    assert stuck.kills == 1


@pytest.mark.usefixtures("many_descriptors")
def test_a_connection_is_a_pipe_of_a_process_with_many_descriptors() -> None:
    ours, theirs = socket.socketpair()
    pipe = pump_pipe(
        ours, receive=lambda: ours.recv(9) or None, send=ours.sendall, close=ours.close, explain=str, first=b"first"
    )
    os.write(pipe.stdin, b"to it")
    assert (os.read(pipe.stdout, 9), theirs.recv(9)) == (b"first", b"to it")
    theirs.sendall(b"from it")
    assert os.read(pipe.stdout, 9) == b"from it"
    theirs.close()
    assert (os.read(pipe.stdout, 9), pipe.end()) == (b"", "")


@pytest.mark.parametrize(
    ("sent", "failure"),
    [
        (b"x" * 70_000, "its node is not reached"),
        (MAGIC + b"1\xff\xff\xff\xff", "it sent a frame of 4294967295 bytes: at most 16777216 are allowed"),
        (MAGIC + pack(Kind.EXIT, b"x"), "invalid literal for int() with base 10: b'x'"),
    ],
)
def test_a_node_that_sends_something_else_is_lost(sent: bytes, failure: str) -> None:
    stdout, theirs = socket.socketpair()
    with open(os.devnull, "wb") as stdin, stdout, theirs:
        session = Session(NodePipe(stdin=stdin.fileno(), stdout=stdout.fileno(), end=str), "command", {})
        heard_s = session.heard_s
        theirs.sendall(sent)
        while not session.is_over:
            assert list(session.receive()) == []
            assert session.was_reached or session.heard_s == heard_s, "noise is no sign of life"
    assert session.failure == failure


def test_frames_of_docker_are_cut_wherever_they_break() -> None:
    frames = b"\1\0\0\0\0\0\0\4out1" + b"\2\0\0\0\0\0\0\4err\n" + b"\1\0\0\0\0\0\0\4out2"
    for size in (1, 5, 13, 100):
        pieces = [frames[at : at + size] for at in range(0, len(frames), size)]
        left = iter([*pieces, b""])
        connection = SimpleNamespace(recv=lambda count, left=left: next(left), settimeout=lambda limit_s: None)
        stream = InsideStream(connection, b"")
        output = b""
        while (data := stream.receive()) is not None:
            output += data
        assert (output, stream.explain()) == (b"out1out2", "err")
