"""The template: what it refuses to fork, what happens when it dies, and that it leaves no process behind."""

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from fidelity import DRIVER, PROBES, Probe, build_env, compare, run_started
from harness import LIMIT_S, Tree, wait_until
from subreaper import list_processes

from muster._shared import processes
from muster._shared.records import replace
from muster.agent.runtime.loop import Loop
from muster.agent.runtime.ports import PortReservation
from muster.agent.runtime.signals import ChildWatch, SignalWatch
from muster.agent.workers import stall_watch
from muster.agent.workers.cold import CommandStarter
from muster.agent.workers.spec import Program, ProgramKind, WorkerSpec
from muster.agent.workers.warm.starter import TemplateStarter
from muster.agent.workers.warm.template_handle import TemplateOptions

ENV = dict(os.environ)


class Agent:
    """A starter on a loop with a reaper, in this process."""

    def __init__(self, script: str, *, nproc: int = 2, preload: str = "auto", kind: str = "script") -> None:
        self.loop = Loop()
        self.records: list[dict[str, object]] = []
        self.notices: list[str] = []
        self.ended: dict[int, int] = {}
        self.started: dict[int, int] = {}
        self.failed: dict[int, str] = {}
        self.program = Program(kind=ProgramKind(kind), target=script)
        options = TemplateOptions(program=self.program, nproc=nproc, env=ENV, preload=preload)
        self.children = ChildWatch(self.loop)
        self.starter = TemplateStarter(
            self.loop,
            self.children,
            CommandStarter(),
            options,
            on_notice=self.notices.append,
            on_record=lambda what, **detail: self.records.append({"what": what, **detail}),
        )
        self.watch = SignalWatch(self.loop, self.children, handled=(), on_signal=lambda _: None, on_stacks=lambda: None)

    def record_start(self, local_rank: int, pid: int) -> None:
        self.started[local_rank] = pid
        self.children.watch(pid, lambda code: self.ended.__setitem__(pid, code))

    def turn_until(self, holds: Callable[[], object]) -> None:
        limit = self.loop.call_later(LIMIT_S, lambda: pytest.fail(f"timed out: {self.records} {self.notices}"))
        while not holds():
            self.loop.turn()
        limit.cancel()

    def has(self, what: str, count: int = 1) -> bool:
        return [record["what"] for record in self.records].count(what) >= count

    @property
    def ways(self) -> list[object]:
        return [record["how"] for record in self.records if record["what"] == "worker_released"]

    def start(self, nproc: int = 2, *, env: Mapping[str, str] = ENV, **changes: object) -> None:
        self.started.clear()
        specs = [
            WorkerSpec(
                local_rank=rank,
                program=self.program,
                env={**env, "RANK": str(rank)},
                **changes,  # type: ignore[arg-type]
            )
            for rank in range(nproc)
        ]
        self.starter.start(specs, self.record_start, lambda rank, error: self.failed.update({rank: str(error)}))

    def wait_for_end(self, nproc: int = 2) -> list[int]:
        self.turn_until(lambda: len(self.started) == nproc and all(p in self.ended for p in self.started.values()))
        return [self.ended[pid] for _, pid in sorted(self.started.items())]

    def run(self, codes: Sequence[int] = (40, 41)) -> None:
        """Start workers that end with these codes."""
        self.start(len(codes))
        assert self.wait_for_end(len(codes)) == list(codes)

    @property
    def template_pid(self) -> int:
        assert self.starter._template is not None
        return self.starter._template.pid


def list_open() -> set[str]:
    """What the descriptors of this process refer to."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return {os.readlink(link) for link in links if os.path.islink(link)}


@pytest.fixture
def make_agent() -> Iterator[Callable[..., Agent]]:
    before = list_open()
    processes.become_subreaper()
    STRANGERS[:] = []
    STRANGERS[:] = list_children()
    agents: list[Agent] = []

    def make(script: str, **options: object) -> Agent:
        agents.append(Agent(script, **options))  # type: ignore[arg-type]
        agents[-1].starter.prepare(lambda: None, lambda: None)
        return agents[-1]

    yield make
    for agent in agents:
        agent.starter.close()
        wait_until(lambda agent=agent: agent.children.reap() or not list_children(), what="the end of everything")
        agent.watch.close()
        agent.children.close()
        agent.loop.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    assert list_open() <= before  # fewer when the collector closes what an earlier test left


def list_children() -> list[int]:
    """Living children of this process that the test has started, or what it started."""
    own = [pid for pid, (ppid, state, _) in list_processes().items() if ppid == os.getpid() and state not in "ZX"]
    return [pid for pid in own if pid not in STRANGERS]


STRANGERS: list[int] = []
"""Children that were there before the test: this process is a subreaper, and has run other tests."""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "main.py"
    path.write_text("import os, sys\nsys.exit(40 + int(os.environ['RANK']))\n")
    return str(path)


@pytest.fixture
def agent(make_agent: Callable[..., Agent], script: str) -> Agent:
    """One with two parked workers."""
    made = make_agent(script)
    made.turn_until(lambda: made.has("workers_parked"))
    return made


def test_parked_workers_are_used_and_the_template_survives(agent: Agent) -> None:
    template, parked = agent.template_pid, {one.pid for one in agent.starter._parked}
    assert len(parked) == 2
    keep = agent.starter.list_own_pids()
    assert all(pid in keep for pid in (template, *parked))
    agent.start()
    assert set(agent.started.values()) == parked
    assert agent.wait_for_end() == [40, 41]
    agent.starter.park(2)
    agent.turn_until(lambda: agent.has("workers_parked", 2))
    agent.run()
    assert agent.template_pid == template
    assert agent.ways == ["warm"] * 4
    (ready,) = (record for record in agent.records if record["what"] == "template_ready")
    assert 0 < ready["pss_bytes"] <= ready["rss_bytes"]  # type: ignore[operator]


def test_a_parked_worker_that_died_is_replaced(agent: Agent) -> None:
    first, second = (one.pid for one in agent.starter._parked)
    os.kill(first, signal.SIGKILL)
    agent.turn_until(lambda: first not in agent.children._callbacks)
    agent.run()
    assert second in agent.started.values()
    assert agent.ways == ["warm", "warm"]


@pytest.mark.parametrize("killed", [False, True])
def test_an_intermediate_waits_for_the_next_forks(agent: Agent, killed: bool) -> None:
    """It is the template's child, and the workers it forks the agent's; one that was killed costs a fork."""

    def list_intermediates() -> list[int]:
        found = list_processes().items()
        return [pid for pid, (ppid, state, _) in found if ppid == agent.template_pid and state not in "ZX"]

    wait_until(lambda: len(list_intermediates()) == 1, what="an intermediate")
    (intermediate,) = list_intermediates()
    if killed:
        os.kill(intermediate, signal.SIGKILL)
        wait_until(lambda: list_intermediates() == [], what="its end")
    agent.starter.park(4)
    agent.turn_until(lambda: agent.has("workers_parked", 2))
    assert intermediate not in list_processes()
    agent.run([40, 41, 42, 43])
    assert agent.ways == ["warm"] * 4
    assert agent.notices == []


def test_more_than_were_parked_and_fewer(agent: Agent) -> None:
    agent.run([40, 41, 42, 43, 44])
    agent.starter.park(4)
    agent.turn_until(lambda: len(agent.starter._parked) == 4)
    agent.run([40])
    wait_until(lambda: agent.children.reap() or list_children() == [agent.template_pid], what="the end of the others")


def test_a_sweep_spares_workers_being_forked(agent: Agent) -> None:
    agent.start()
    agent.wait_for_end()
    for count in range(2, 8):
        agent.starter.park(2)
        while not agent.has("workers_parked", count):
            swept = processes.list_descendants(os.getpid(), keep=agent.starter.list_own_pids())  # as the pool does
            processes.send_signal(swept, signal.SIGKILL)
            agent.loop.turn(0.001)
        parked = {one.pid for one in agent.starter._parked}
        agent.start()
        assert set(agent.started.values()) == parked
        assert agent.wait_for_end() == [40, 41]


CLIENT = """
import os, sys, time
from torch.distributed import TCPStore
time.sleep(float(sys.argv[1]) * int(os.environ["RANK"]))
for _ in range(int(sys.argv[2])):
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, False)
    store.add("came", 1)
    if _:
        time.sleep(1)
sys.exit(0 if store.get("came") else 1)
"""


class StoreUser:
    """An agent whose round's workers are clients of its store."""

    def __init__(self, agent: Agent, tmp_path: Path, *, apart_s: float = 0.0, times: int = 1) -> None:
        self.agent = agent
        self.lost: list[str] = []
        self.reservation = PortReservation()  # as the agent holds a MASTER_PORT
        self.port = self.reservation.port
        (tmp_path / "main.py").write_text(CLIENT)
        agent.program = replace(agent.program, args=(str(apart_s), str(times)))

    def begin_round(self) -> None:
        self.agent.starter.start_store("127.0.0.1", self.port, self.lost.append)
        self.agent.start(env={**ENV, "MASTER_PORT": str(self.port)})

    @property
    def pid(self) -> int:
        assert self.agent.starter._store is not None
        return self.agent.starter._store.pid


@pytest.fixture
def make_user(make_agent: Callable[..., Agent], tmp_path: Path) -> Iterator[Callable[..., StoreUser]]:
    users: list[StoreUser] = []

    def make(*, preload: str = "auto", **options: float) -> StoreUser:
        script = tmp_path / "main.py"
        script.write_text("import torch\n")
        users.append(StoreUser(make_agent(str(script), preload=preload), tmp_path, **options))  # type: ignore[arg-type]
        return users[-1]

    yield make
    for user in users:
        user.agent.starter.end_store()
        user.reservation.close()


def test_the_store_of_a_round_is_a_process_of_its_own(make_user: Callable[..., StoreUser]) -> None:
    """Also while the template still imports. It serves later rounds at the same port, too."""
    user = make_user(apart_s=1.0)
    user.begin_round()
    stores = []
    for _ in range(2):
        assert user.agent.wait_for_end() == [0, 0]
        stores.append(user.pid)
        assert os.getsid(user.pid) == os.getsid(user.agent.template_pid) != os.getsid(0)
        assert user.pid in user.agent.starter.list_own_pids()
        assert user.pid not in user.agent.started.values()
        user.begin_round()
    assert user.agent.wait_for_end() == [0, 0]
    assert len(set(stores)) == 1
    assert (user.lost, user.agent.notices) == ([], [])
    assert user.agent.ways == ["warm"] * 6


EVERYWHERE = {"127.0.0.1", "127.0.0.2", *(["::1"] if socket.has_dualstack_ipv6() else [])}


def test_the_store_listens_at_once_at_its_address(make_user: Callable[..., StoreUser]) -> None:
    user = make_user()
    for addr, reached in (
        ("127.0.0.1", {"127.0.0.1"}),
        ("localhost", {"127.0.0.1"}),
        ("::1", {"::1"} & EVERYWHERE),
        ("a-name", EVERYWHERE),
        ("192.0.2.1", EVERYWHERE),  # another machine's, with NAT
    ):
        user.agent.starter.start_store(addr, user.port, user.lost.append)
        for host in EVERYWHERE:
            with contextlib.nullcontext() if host in reached else pytest.raises(ConnectionRefusedError):
                socket.create_connection((host, user.port)).close()
        user.agent.starter.end_store()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", user.port))


def test_without_a_template_the_store_starts_cold(make_user: Callable[..., StoreUser], tmp_path: Path) -> None:
    """The round had promised it before the template ended."""
    (tmp_path / "fatal.py").write_text("import os\nos._exit(9)\n")
    user = make_user(preload="torch,fatal")
    user.agent.turn_until(user.agent.starter.can_host_store)
    user.begin_round()
    assert user.agent.wait_for_end() == [0, 0]
    assert user.agent.ways == ["cold", "cold"]
    assert user.pid in user.agent.starter.list_own_pids()
    assert not user.agent.starter.can_host_store()
    assert user.lost == []


def test_the_end_of_the_store_is_reported(make_user: Callable[..., StoreUser]) -> None:
    user = make_user(times=2)
    user.begin_round()
    user.agent.turn_until(lambda: len(user.agent.started) == 2)
    os.kill(user.pid, signal.SIGKILL)
    user.agent.turn_until(lambda: user.lost)
    assert ["process was ended" in each for each in user.lost] == [True]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", user.port))
    processes.send_signal(list(user.agent.started.values()), signal.SIGKILL)  # one that came too late tries for minutes
    user.agent.wait_for_end()


def test_a_port_that_is_taken_is_reported(make_user: Callable[..., StoreUser]) -> None:
    user = make_user()
    with socket.create_server(("", 0)) as taken:
        user.port = taken.getsockname()[1]
        user.agent.starter.start_store("127.0.0.1", user.port, user.lost.append)
    assert [f"MASTER_PORT {user.port}: Address already in use" in each for each in user.lost] == [True]


@pytest.mark.parametrize("source", ["import torch\n", "import json\n"])
def test_without_torch_and_where_the_user_switches_the_shared_store_off_there_is_none(
    source: str, make_agent: Callable[..., Agent], script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(script).write_text(source)
    if "torch" in source:
        monkeypatch.setitem(ENV, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    agent = make_agent(script)
    agent.turn_until(lambda: agent.has("template_ready"))
    assert not agent.starter.can_host_store()


def test_cancelled_starts_do_not_happen(make_agent: Callable[..., Agent], script: str) -> None:
    agent = make_agent(script)
    agent.start()
    agent.starter.cancel()
    agent.turn_until(lambda: agent.has("workers_parked"))
    assert (agent.started, agent.ways) == ({}, [])
    agent.run()


def test_a_dead_template_is_started_again_and_workers_start_cold_meanwhile(agent: Agent) -> None:
    agent.start()
    agent.wait_for_end()
    first = agent.template_pid
    os.kill(first, signal.SIGKILL)
    agent.turn_until(lambda: first not in agent.children._callbacks)
    agent.run()
    assert agent.ways == ["warm", "warm", "cold", "cold"]
    assert any("template was ended" in notice for notice in agent.notices)
    agent.turn_until(lambda: agent.has("template_ready", 2))
    agent.run()
    assert agent.ways[4:] == ["warm", "warm"]
    assert agent.template_pid != first


def test_a_template_that_dies_while_asked_to_fork(agent: Agent) -> None:
    os.kill(agent.template_pid, signal.SIGSTOP)
    agent.start(4)
    assert len(agent.started) == 2
    os.kill(agent.template_pid, signal.SIGKILL)
    assert agent.wait_for_end(4) == [40, 41, 42, 43]
    assert agent.ways == ["warm", "warm", "cold", "cold"]


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten looks instead of a minute: enough to run once, also on a busy machine."""
    monkeypatch.setattr(stall_watch, "LOOK_S", 0.1)
    monkeypatch.setattr(stall_watch, "ANSWER_LIMIT_S", 1.0)
    monkeypatch.setattr(stall_watch, "IMPORT_LIMIT_S", 1.0)


BLOCKED_IMPORT = "import os\nos.read(os.pipe()[0], 1)\n"
BLOCKED_FORK = """
import os, threading
lock = threading.Lock()
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release)  # not in the child, whose forks wait for ever
"""


@pytest.mark.soak
@pytest.mark.usefixtures("short_limits")
@pytest.mark.parametrize(
    ("source", "where"),
    [(BLOCKED_IMPORT, "while importing odd"), (BLOCKED_FORK, "when it was to fork workers")],
    ids=["import", "fork"],
)
def test_a_module_that_blocks_the_template_for_ever(
    source: str, where: str, make_agent: Callable[..., Agent], script: str, tmp_path: Path
) -> None:
    (tmp_path / "odd.py").write_text(source)
    agent = make_agent(script, preload="odd")
    agent.run()
    assert [f"still for 1 s {where}, " in each for each in agent.notices] == [True]
    wait_until(lambda: agent.children.reap() or not list_children(), what="the end of everything")


def test_a_template_that_dies_importing_is_not_tried_again(make_agent: Callable[..., Agent], tmp_path: Path) -> None:
    (tmp_path / "fatal.py").write_text("import os, sys\nprint('no such luck', file=sys.stderr)\nos._exit(9)\n")
    script = tmp_path / "main.py"
    script.write_text("import sys\nsys.exit(3)\n")
    agent = make_agent(str(script), preload="fatal")
    agent.run([3, 3])
    assert agent.ways == ["cold", "cold"]
    [notice] = agent.notices
    assert notice.endswith("no such luck")


FAKE_TORCH = """
import sys, types
sys.modules["torch"] = types.ModuleType("torch")
sys.modules["torch"].{} = types.SimpleNamespace(is_initialized=lambda: True)
"""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        pytest.param("raise ValueError('half')", "the import of odd failed half-way", marks=pytest.mark.long),
        ("import sys\nsys.exit('enough')", "the import of odd failed half-way"),
        pytest.param("import no_such_module", "the import of odd failed half-way", marks=pytest.mark.long),
        ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True, name='t1').start()", "(t1)"),
        ("import socket\nkept = socket.socketpair()", "open (socket:["),
        ("import os\nkept = os.pipe()", "open (pipe:["),
        ("import os\nkept = os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY)", "ptmx)"),  # CUDA's cuInit leaves such files
        (FAKE_TORCH.format("cuda"), "an import has initialised cuda"),
        (FAKE_TORCH.format("xpu"), "an import has initialised xpu"),
    ],
)
def test_imports_that_make_forking_unsafe(
    source: str, reason: str, make_agent: Callable[..., Agent], tmp_path: Path
) -> None:
    (tmp_path / "odd.py").write_text(source + "\n")
    script = tmp_path / "main.py"
    script.write_text("import sys\nsys.exit(3)\n")
    agent = make_agent(str(script), preload="odd")
    agent.run([3, 3])
    agent.run([3, 3])
    assert agent.ways == ["cold"] * 4
    assert reason in agent.notices[-1]
    assert sum("workers start cold" in notice for notice in agent.notices) == 1


def test_a_module_that_does_not_exist_is_reported_and_left_to_the_workers(
    make_agent: Callable[..., Agent], script: str
) -> None:
    agent = make_agent(script, preload="no_such_module,json")
    agent.run()
    assert agent.ways == ["warm", "warm"]
    assert ["preload no_such_module: ModuleNotFoundError: " in each for each in agent.notices] == [True]


def test_what_imports_print_is_printed_by_every_worker(tmp_path: Path) -> None:
    (tmp_path / "chatty.py").write_text("import sys\nprint('imported')\nprint('warned', file=sys.stderr)\n")
    script = tmp_path / "main.py"
    script.write_text("import chatty\nprint('runs')\n")
    started = run_started(Probe(target=str(script), preload="chatty"), "warm", tmp_path / "out", nproc=2, rounds=2)
    assert set(started.ways) == {"warm"}
    for workers in started.shown:
        assert [(shown.stdout, shown.stderr) for shown in workers] == [("imported\nruns\n", "warned\n")] * 2


@pytest.mark.parametrize(
    "statement",
    [
        "pass",
        "gc.disable(); gc.set_threshold(5000, 50, 50)",
        pytest.param("gc.set_threshold(0)", marks=pytest.mark.long),
    ],
)
def test_the_collector_is_as_the_imports_leave_it(statement: str, tmp_path: Path) -> None:
    """The template pauses it while it imports; a worker must not see that."""
    (tmp_path / "tunes.py").write_text(f"import gc\n{statement}\n")
    script = tmp_path / "main.py"
    script.write_text("import gc, tunes\nprint(gc.isenabled(), gc.get_threshold())\n")
    compare(Probe(target=str(script), preload="tunes"), tmp_path / "out")
    text = (tmp_path / "out" / "warm" / "0.0.out").read_text()
    assert text.startswith("False" if "disable" in statement else "True")


FILTER = "import warnings\nwarnings.filterwarnings('ignore', {!r}, UserWarning)\n"


@pytest.mark.parametrize(
    ("before", "shown"),
    [
        ("", ["main.py:1: DeprecationWarning: to main", "noisy.py:3: UserWarning: to all"]),
        (FILTER.format("to all"), ["main.py:3: DeprecationWarning: to main"]),
        pytest.param(
            FILTER.format("another"),
            ["main.py:3: DeprecationWarning: to main", "noisy.py:3: UserWarning: to all"],
            marks=pytest.mark.long,
        ),
        pytest.param("import warnings\nwarnings.simplefilter('ignore')\n", [], marks=pytest.mark.long),
        (
            "import warnings\nwarnings.simplefilter('always')\n",
            ["main.py:3", "noisy.py:3", "noisy.py:4: ImportWarning"],
        ),
        ("import quiet\n", []),
        ("import sys, warnings\nwarnings.filterwarnings(sys.argv[1])\n", []),
    ],
    ids=["none", "matching", "other", "all off", "all on", "in a module", "not literal"],
)
def test_imports_warn_as_the_programs_own_would(before: str, shown: list[str], tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(
        "import warnings\n"
        "warnings.warn('to main', DeprecationWarning, stacklevel=2)\n"
        "warnings.warn('to all')\n"
        "warnings.warn('hidden by default', ImportWarning)\n"
    )
    (tmp_path / "quiet.py").write_text("import warnings\nwarnings.filterwarnings('ignore')\n")
    script = tmp_path / "main.py"
    script.write_text(f"{before}import noisy\nprint(warnings.filters if 'warnings' in globals() else '')\n")
    probe = Probe(target=str(script), args=("ignore",), preload="noisy")
    compare(probe, tmp_path / "out")
    text = (tmp_path / "out" / "warm" / "0.0.err").read_text()
    assert all(line in text for line in shown), text
    assert bool(shown) == bool(text)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"command_prefix": ("env",)}, "workers are started through env"),
        (
            {"env": {**ENV, "RANK": "0", "OMP_NUM_THREADS": "77"}},
            "OMP_NUM_THREADS differs between the workers",
        ),
    ],
)
def test_workers_that_a_fork_cannot_become_start_cold(changes: dict[str, object], reason: str, agent: Agent) -> None:
    spec = {"local_rank": 0, "program": agent.program, "env": {**ENV, "RANK": "0"}, **changes}
    agent.starter.start([WorkerSpec(**spec)], agent.record_start, agent.failed.__setitem__)  # type: ignore[arg-type]
    assert agent.wait_for_end(1) == [40]
    assert agent.ways == ["cold"]
    assert reason in agent.notices[0]


def test_a_command_starts_cold_without_a_template(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent("true", kind="command")
    agent.run([0, 0])
    assert (agent.ways, agent.starter._template) == (["cold", "cold"], None)


@pytest.mark.parametrize("moment", ["importing", "parked", "running"])
def test_nothing_outlives_an_agent_that_is_killed(moment: str, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import threading\nthreading.Event().wait(60)\n")
    script = tmp_path / "main.py"
    script.write_text("import threading\nprint('runs', flush=True)\nthreading.Event().wait(60)\n")
    request = {"how": "warm", "kind": "script", "target": str(script), "folder": str(tmp_path), "nproc": 2}
    request |= {
        "preload": "slow" if moment == "importing" else "auto",
        "env": build_env({}),
        "hold": moment == "parked",
    }
    (tmp_path / "request.json").write_text(json.dumps(request))
    expected = {"importing": 2, "parked": 5, "running": 5}[moment]  # an intermediate waits for the next forks
    with Tree([sys.executable, str(DRIVER), str(tmp_path / "request.json")], env=build_env({}), cwd=PROBES) as tree:
        if moment == "running":
            outs = [tmp_path / f"0.{rank}.out" for rank in (0, 1)]
            wait_until(lambda: all(out.exists() and out.read_text() == "runs\n" for out in outs), what="the workers")
        wait_until(lambda: len(tree.descendants()) == expected, what="the processes")
        with suppress(ProcessLookupError):
            tree.send(signal.SIGKILL)
        outcome = tree.wait()
    assert outcome.leftovers == (), outcome.explain()
