"""The template: what it refuses to fork, what happens when it dies, and that it leaves no process behind."""

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from fidelity import DRIVER, PROBES, Probe, build_env, compare, run_started
from harness import Tree, wait_until
from subreaper import list_processes

from muster import _processes
from muster.agent.runtime.loop import Loop
from muster.agent.runtime.ports import PortReservation
from muster.agent.runtime.signals import ChildWatch, SignalWatch
from muster.agent.workers.cold import CommandStarter
from muster.agent.workers.spec import Program, ProgramKind, WorkerSpec
from muster.agent.workers.warm import head_start
from muster.agent.workers.warm.starter import TemplateStarter
from muster.agent.workers.warm.template_handle import TemplateOptions

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="warm start is for Linux")

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
        self.loop.call_later(60, lambda: pytest.fail(f"timed out: {self.records} {self.notices}"))
        while not holds():
            self.loop.turn()

    def has(self, what: str, count: int = 1) -> bool:
        return [record["what"] for record in self.records].count(what) >= count

    @property
    def ways(self) -> list[object]:
        return [record["how"] for record in self.records if record["what"] == "worker_released"]

    def start(
        self, nproc: int = 2, *, env: Mapping[str, str] = ENV, store_port: int | None = None, **changes: object
    ) -> None:
        self.started.clear()
        specs = [
            WorkerSpec(
                local_rank=rank,
                program=self.program,
                env={**env, "RANK": str(rank)},
                store_port=None if rank else store_port,
                **changes,  # type: ignore[arg-type]
            )
            for rank in range(nproc)
        ]
        self.starter.start(specs, self.record_start, lambda rank, error: self.failed.update({rank: str(error)}))

    def wait_for_end(self, nproc: int = 2) -> list[int]:
        self.turn_until(lambda: len(self.started) == nproc and all(p in self.ended for p in self.started.values()))
        return [self.ended[pid] for _, pid in sorted(self.started.items())]

    @property
    def template_pid(self) -> int:
        assert self.starter._template is not None
        return self.starter._template.pid


@pytest.fixture
def make_agent() -> Iterator[Callable[..., Agent]]:
    before = set(os.listdir("/proc/self/fd"))
    _processes.become_subreaper()
    agents: list[Agent] = []

    def make(script: str, **options: object) -> Agent:
        agents.append(Agent(script, **options))  # type: ignore[arg-type]
        agents[-1].starter.prepare(lambda: None)
        return agents[-1]

    yield make
    for agent in agents:
        agent.starter.close()
        wait_until(lambda agent=agent: agent.children.reap() or not list_children(), what="the end of everything")
        agent.watch.close()
        agent.children.close()
        agent.loop.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    assert set(os.listdir("/proc/self/fd")) <= before  # fewer when the collector closes what an earlier test left


def list_children() -> list[int]:
    """Living children of this process."""
    return [pid for pid, (ppid, state, _) in list_processes().items() if ppid == os.getpid() and state not in "ZX"]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "main.py"
    path.write_text("import os, sys\nsys.exit(40 + int(os.environ['RANK']))\n")
    return str(path)


def test_parked_workers_are_used_and_the_template_survives(make_agent: Callable[..., Agent], script: str) -> None:
    agent = make_agent(script)
    agent.turn_until(lambda: agent.has("workers_parked"))
    template, parked = agent.template_pid, {one.pid for one in agent.starter._parked}
    assert len(parked) == 2
    keep = agent.starter.list_own_pids()
    assert all(pid in keep for pid in (template, *parked))
    agent.start()
    assert set(agent.started.values()) == parked
    assert agent.wait_for_end() == [40, 41]
    agent.starter.park(2)
    agent.turn_until(lambda: agent.has("workers_parked", 2))
    agent.start()
    assert agent.wait_for_end() == [40, 41]
    assert agent.template_pid == template
    assert agent.ways == ["warm"] * 4
    (ready,) = (record for record in agent.records if record["what"] == "template_ready")
    assert 0 < ready["pss_bytes"] <= ready["rss_bytes"]  # type: ignore[operator]


def test_a_parked_worker_that_died_is_replaced(make_agent: Callable[..., Agent], script: str) -> None:
    agent = make_agent(script)
    agent.turn_until(lambda: agent.has("workers_parked"))
    first, second = (one.pid for one in agent.starter._parked)
    os.kill(first, signal.SIGKILL)
    agent.turn_until(lambda: first not in agent.children._callbacks)
    agent.start()
    assert agent.wait_for_end() == [40, 41]
    assert second in agent.started.values()
    assert agent.ways == ["warm", "warm"]


def test_more_than_were_parked_and_fewer(make_agent: Callable[..., Agent], script: str) -> None:
    agent = make_agent(script)
    agent.turn_until(lambda: agent.has("workers_parked"))
    agent.start(5)
    assert agent.wait_for_end(5) == [40, 41, 42, 43, 44]
    agent.starter.park(4)
    agent.turn_until(lambda: len(agent.starter._parked) == 4)
    agent.start(1)
    assert agent.wait_for_end(1) == [40]
    wait_until(lambda: agent.children.reap() or list_children() == [agent.template_pid], what="the end of the others")


def test_a_sweep_spares_workers_being_forked(make_agent: Callable[..., Agent], script: str) -> None:
    agent = make_agent(script)
    agent.turn_until(lambda: agent.has("workers_parked"))
    agent.start()
    agent.wait_for_end()
    for count in range(2, 8):
        agent.starter.park(2)
        while not agent.has("workers_parked", count):
            _processes.kill_descendants(os.getpid(), keep=agent.starter.list_own_pids())
            agent.loop.turn(0.001)
        parked = {one.pid for one in agent.starter._parked}
        agent.start()
        assert set(agent.started.values()) == parked
        assert agent.wait_for_end() == [40, 41]


def test_no_descriptor_left_is_a_failed_start_and_the_next_one_is_warm(
    make_agent: Callable[..., Agent], script: str
) -> None:
    agent = make_agent(script)
    agent.turn_until(lambda: agent.has("workers_parked"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    with ExitStack() as stack:
        while (filler := os.dup(0)) <= highest:  # this process may have inherited a high one, with free numbers below
            stack.callback(os.close, filler)
        stack.callback(os.close, filler)
        resource.setrlimit(resource.RLIMIT_NOFILE, (filler + 3, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        agent.starter.park(40)
        agent.start(42)
    assert set(agent.started) == {0, 1}
    assert set(agent.failed.values()) == {"cannot make sockets for 40 worker(s): Too many open files"}
    assert sorted(agent.failed) == list(range(2, 42))
    assert agent.wait_for_end() == [40, 41]
    agent.start()
    assert agent.wait_for_end() == [40, 41]
    assert agent.ways == ["warm"] * 4


LISTENS = """
import os, socket, sys, time
if os.environ["RANK"] == "0":
    time.sleep(float(sys.argv[1]))
    server = socket.create_server(("", int(os.environ["MASTER_PORT"])))
    print("listens", flush=True)
    server.accept()
else:
    socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"])))
"""


@pytest.fixture
def store_port() -> Iterator[int]:
    """Held as the agent holds a MASTER_PORT."""
    reservation = PortReservation()
    yield reservation.port
    reservation.close()


@pytest.fixture
def make_listeners(make_agent: Callable[..., Agent], tmp_path: Path, store_port: int) -> Iterator[Callable[..., Agent]]:
    """An agent that starts workers: rank 0 listens after a time; the others fail if they connect before."""
    agents: list[Agent] = []

    def make(late_s: float, *, preload: str = "torch", nproc: int = 3) -> Agent:
        (tmp_path / "main.py").write_text(LISTENS)
        agent = make_agent(str(tmp_path / "main.py"), preload=preload, nproc=nproc)
        agent.program = replace(agent.program, args=(str(late_s),))
        agents.append(agent)
        agent.turn_until(lambda: agent.has("workers_parked"))
        agent.start(nproc, store_port=store_port, env={**ENV, "MASTER_PORT": str(store_port)})
        return agent

    yield make
    for agent in agents:
        _processes.send_signal([pid for pid in agent.started.values() if pid not in agent.ended], signal.SIGKILL)


def test_the_others_wait_until_global_rank_0_listens(
    make_listeners: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_start, "LIMIT_S", 60.0)
    agent, called = make_listeners(0.3), []
    agent.starter.run_after_head_start(lambda: called.append(len(agent.started)))
    assert (list(agent.started), called) == ([0], [])
    assert agent.wait_for_end(3)[1:] == [0, 0]  # neither was refused
    assert called == [1]
    agent.starter.run_after_head_start(lambda: called.append(3))
    assert called == [1, 3]


def test_a_head_start_is_short(make_listeners: Callable[..., Agent]) -> None:
    agent, started_s = make_listeners(1000.0), time.monotonic()
    agent.turn_until(lambda: len(agent.started) == 3)
    assert 0.09 < time.monotonic() - started_s < 5.0
    assert agent.ways == ["warm"] * 3


def test_workers_cancelled_during_a_head_start_do_not_start(make_listeners: Callable[..., Agent]) -> None:
    agent, called = make_listeners(1000.0), []
    agent.starter.run_after_head_start(lambda: called.append(True))
    agent.starter.cancel()
    over: list[bool] = []
    agent.loop.call_later(0.3, lambda: over.append(True))
    agent.turn_until(lambda: over)
    assert (list(agent.started), called) == ([0], [])
    agent.starter.run_after_head_start(lambda: called.append(True))
    assert called == [True]


def test_a_head_start_ends_with_its_round(
    make_listeners: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one worker on the node there is no start to cancel when the round ends."""
    monkeypatch.setattr(head_start, "LIMIT_S", 60.0)
    agent, called = make_listeners(1000.0, nproc=1), []
    agent.starter.run_after_head_start(lambda: called.append(True))
    (first,) = agent.started.values()
    _processes.send_signal([first], signal.SIGKILL)
    agent.turn_until(lambda: first not in agent.children._callbacks)
    agent.start(2)
    agent.turn_until(lambda: len(agent.started) == 2)
    assert not called


def test_without_torch_there_is_no_head_start(make_listeners: Callable[..., Agent]) -> None:
    assert len(make_listeners(1000.0, preload="json").started) == 3


def test_cancelled_starts_do_not_happen(make_agent: Callable[..., Agent], script: str) -> None:
    agent = make_agent(script)
    agent.start()
    agent.starter.cancel()
    agent.turn_until(lambda: agent.has("workers_parked"))
    assert (agent.started, agent.ways) == ({}, [])
    agent.start()
    assert agent.wait_for_end() == [40, 41]


def test_a_dead_template_is_started_again_and_workers_start_cold_meanwhile(
    make_agent: Callable[..., Agent], script: str
) -> None:
    agent = make_agent(script)
    agent.turn_until(lambda: agent.has("workers_parked"))
    agent.start()
    agent.wait_for_end()
    first = agent.template_pid
    os.kill(first, signal.SIGKILL)
    agent.turn_until(lambda: first not in agent.children._callbacks)
    agent.start()
    assert agent.wait_for_end() == [40, 41]
    assert agent.ways == ["warm", "warm", "cold", "cold"]
    assert any("the template ended (SIGKILL)" in notice for notice in agent.notices)
    agent.turn_until(lambda: agent.has("template_ready", 2))
    agent.start()
    assert agent.wait_for_end() == [40, 41]
    assert agent.ways[4:] == ["warm", "warm"]
    assert agent.template_pid != first


def test_a_template_that_dies_while_asked_to_fork(make_agent: Callable[..., Agent], script: str) -> None:
    agent = make_agent(script)
    agent.turn_until(lambda: agent.has("workers_parked"))
    os.kill(agent.template_pid, signal.SIGSTOP)
    agent.start(4)
    assert len(agent.started) == 2
    os.kill(agent.template_pid, signal.SIGKILL)
    assert agent.wait_for_end(4) == [40, 41, 42, 43]
    assert agent.ways == ["warm", "warm", "cold", "cold"]


def test_a_template_that_dies_importing_is_not_tried_again(make_agent: Callable[..., Agent], tmp_path: Path) -> None:
    (tmp_path / "fatal.py").write_text("import os, sys\nprint('no such luck', file=sys.stderr)\nos._exit(9)\n")
    script = tmp_path / "main.py"
    script.write_text("import sys\nsys.exit(3)\n")
    agent = make_agent(str(script), preload="fatal")
    agent.start()
    assert agent.wait_for_end() == [3, 3]
    assert agent.ways == ["cold", "cold"]
    assert agent.notices == ["workers start cold: the template ended (exit code 9) while importing: no such luck"]


FAKE_TORCH = """
import sys, types
sys.modules["torch"] = types.ModuleType("torch")
sys.modules["torch"].{} = types.SimpleNamespace(is_initialized=lambda: True)
"""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ValueError('half')", "the import of odd failed half-way"),
        ("import sys\nsys.exit('enough')", "the import of odd failed half-way"),
        ("import no_such_module", "the import of odd failed half-way"),
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
    agent.start()
    assert agent.wait_for_end() == [3, 3]
    agent.start()
    assert agent.wait_for_end() == [3, 3]
    assert agent.ways == ["cold"] * 4
    assert reason in agent.notices[-1]
    assert sum("workers start cold" in notice for notice in agent.notices) == 1


def test_a_module_that_does_not_exist_is_reported_and_left_to_the_workers(
    make_agent: Callable[..., Agent], script: str
) -> None:
    agent = make_agent(script, preload="no_such_module,json")
    agent.start()
    assert agent.wait_for_end() == [40, 41]
    assert agent.ways == ["warm", "warm"]
    assert agent.notices == [
        "cannot preload no_such_module: ModuleNotFoundError: No module named 'no_such_module'; left to the workers"
    ]


def test_what_imports_print_is_printed_by_every_worker(tmp_path: Path) -> None:
    (tmp_path / "chatty.py").write_text("import sys\nprint('imported')\nprint('warned', file=sys.stderr)\n")
    script = tmp_path / "main.py"
    script.write_text("import chatty\nprint('runs')\n")
    started = run_started(Probe(target=str(script), preload="chatty"), "warm", tmp_path / "out", nproc=2, rounds=2)
    assert set(started.ways) == {"warm"}
    for workers in started.shown:
        assert [(shown.stdout, shown.stderr) for shown in workers] == [("imported\nruns\n", "warned\n")] * 2


@pytest.mark.parametrize("statement", ["pass", "gc.disable()", "gc.set_threshold(5000, 50, 50)", "gc.set_threshold(0)"])
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
        (FILTER.format("another"), ["main.py:3: DeprecationWarning: to main", "noisy.py:3: UserWarning: to all"]),
        ("import warnings\nwarnings.simplefilter('ignore')\n", []),
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
def test_workers_that_a_fork_cannot_become_start_cold(
    changes: dict[str, object], reason: str, make_agent: Callable[..., Agent], script: str
) -> None:
    agent = make_agent(script)
    agent.turn_until(lambda: agent.has("workers_parked"))
    spec = {"local_rank": 0, "program": agent.program, "env": {**ENV, "RANK": "0"}, **changes}
    agent.starter.start([WorkerSpec(**spec)], agent.record_start, agent.failed.__setitem__)  # type: ignore[arg-type]
    assert agent.wait_for_end(1) == [40]
    assert agent.ways == ["cold"]
    assert reason in agent.notices[0]


def test_a_command_starts_cold_without_a_template(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent("true", kind="command")
    agent.start()
    assert agent.wait_for_end() == [0, 0]
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
    expected = {"importing": 2, "parked": 4, "running": 4}[moment]
    with Tree([sys.executable, str(DRIVER), str(tmp_path / "request.json")], env=build_env({}), cwd=PROBES) as tree:
        if moment == "running":
            outs = [tmp_path / f"0.{rank}.out" for rank in (0, 1)]
            wait_until(lambda: all(out.exists() and out.read_text() == "runs\n" for out in outs), what="the workers")
        wait_until(lambda: len(tree.descendants()) == expected, what="the processes")
        with suppress(ProcessLookupError):
            tree.send(signal.SIGKILL)
        outcome = tree.wait()
    assert outcome.leftovers == (), outcome.explain()
