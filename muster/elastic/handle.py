"""`launch`: functions as workers, for new code, with typed results, failures as data, and a handle.

    results = launch(train, (0.1,), nproc=4, max_restarts=3)
    results[0]                                   # what global rank 0 returned

    with launch(train, (0.1,), nproc=4, wait=False) as job:
        ...
        results = job.wait()

This process does not need torch.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muster._shared.contract import Env, ExitCode, describe_exit_code
from muster._shared.reports import Failure, Report
from muster.agent.diagnosis.root_cause import find_root
from muster.agent.errors import MusterError, UsageError
from muster.agent.placement.device_count import count_workers
from muster.agent.runtime.event_log import EventRecord
from muster.elastic.failures import build_cause, format_worker_failure
from muster.elastic.jobs.errors import AgentLost, ResultsMissing
from muster.elastic.jobs.job import Job, Outcome, Record
from muster.elastic.jobs.results import WorkerServer, close_fds, load_results
from muster.elastic.launcher import (
    build_function_words,
    collect_results,
    name_entrypoint,
    start_function_server,
    take_node,
)

_PHASES = {
    "round_formed": "starting",
    "workers_started": "running",
    "round_broken": "stopping",
    "workers_stopped": "waiting",
    "signal": "stopping",
}
"""From the record of an event to the phase that follows it."""


class LaunchFailed(MusterError):
    """The job did not succeed. `__cause__` is what the worker that failed first raised, with its traceback."""

    def __init__(self, line: str, report: Report | None, exit_code: int | None) -> None:
        super().__init__(line)
        self.report = report
        """The failure report of the whole job. None: no worker failed."""
        self.agent_exit_code = exit_code
        """See `_shared.contract.ExitCode`."""

    @property
    def failures(self) -> tuple[Failure, ...]:
        """All failed workers of the job, the first one first."""
        return () if self.report is None else self.report.failures


@dataclass(frozen=True)
class Results(Mapping[int, Any]):
    """What each worker of this node returned in the round that succeeded, by global rank.

    With `all_results`, what each worker of the job returned.
    """

    values_by_rank: Mapping[int, Any]
    attempt: int
    """How often workers had been restarted because one failed."""

    def __getitem__(self, global_rank: int) -> Any:
        return self.values_by_rank[global_rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self.values_by_rank)

    def __len__(self) -> int:
        return len(self.values_by_rank)


@dataclass(frozen=True, kw_only=True)
class JobState:
    """What a job is doing on this node."""

    phase: str
    """waiting (for the other nodes), starting, running, stopping, succeeded or failed."""
    round: int
    """The number of the round. It is 0 before the first one."""
    attempt: int
    ranks: tuple[int, ...]
    """This node's global ranks."""
    pids: Mapping[int, int]
    """The workers' processes, by local rank."""


class JobHandle:
    """A running job. As a context manager it stops the job at the end of the block if the job still runs."""

    def __init__(self, job: Job, server: WorkerServer, watch: "_StateWatch", token: str | None = None) -> None:
        """Keep the job. Nothing waits for it yet.

        Args:
            job: it has been started.
            server: serves the job's workers. It is closed with the job.
            watch: gets the job's records.
            token: the job's, when results are exchanged with the programs of the other nodes.
        """
        self._job = job
        self._server = server
        self._watch = watch
        self._token = token
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._results: Results | None = None
        self._others: dict[int, int] = {}
        """The files of the other nodes' results, by global rank."""
        self._missing: ResultsMissing | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def run(self) -> None:
        """Wait in this thread until the job has ended. Then `wait` returns at once."""
        try:
            self._outcome = self._job.run()
            if self._outcome.code == ExitCode.SUCCEEDED:
                self._exchange_results()
        except BaseException as error:  # `wait` raises it in another thread
            self._error = error
            raise
        finally:
            self._ended.set()

    def _exchange_results(self) -> None:
        """Exchange the results at once, not when the caller asks: the programs of the other nodes wait."""
        position = self._server.position
        if self._token is None or position is None or position.nodes == 1:
            return
        from muster.elastic.jobs.exchange import exchange_results  # only where there are other nodes

        try:
            self._others = exchange_results(position, self._server.result_fds, self._token)
        except ResultsMissing as error:
            self._missing = error

    def run_in_thread(self) -> None:
        """Wait for the job in a thread of its own."""

        def run() -> None:
            with contextlib.suppress(BaseException):  # `run` has kept it for `wait`
                self.run()

        threading.Thread(target=run, name="muster-job", daemon=True).start()

    def wait(self, timeout_s: float | None = None) -> Results:
        """Wait for the end, and return what the workers returned.

        Args:
            timeout_s: the longest wait, in seconds. None: there is no limit.

        Raises:
            TimeoutError: the job still runs after `timeout_s`.
            LaunchFailed: it did not succeed.
            AgentLost: the job's muster process was killed.
            PickleFault: a result cannot be loaded here.
            ResultsMissing: the job succeeded, but with `all_results` some results of another node did not come. The
                exception has this node's.
        """
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"the job still runs after {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        assert self._outcome is not None  # noqa: S101  # it has ended
        with self._lock:
            if self._results is None:
                try:
                    self._results = self._load_results(self._outcome)
                except BaseException as error:  # every later call raises it
                    self._error = error
                    raise
                finally:
                    self._close()
        return self._results

    def _load_results(self, outcome: Outcome) -> Results:
        _raise_if_failed(outcome, self._server)
        own = collect_results(outcome, self._server)
        if self._missing is not None:
            self._missing.results = own
            raise self._missing
        values = {**own, **load_results(self._others)}
        return Results(dict(sorted(values.items())), self._watch.state.attempt)

    def _close(self) -> None:
        self._server.close()
        close_fds(self._others.values())
        self._others = {}

    @property
    def state(self) -> JobState:
        """What the job is doing now."""
        return self._watch.state

    def stop(self) -> None:
        """Stop this node politely, and return at once. Workers get SIGTERM and the grace period."""
        if not self._ended.is_set():
            self._job.stop()

    def kill(self) -> None:
        """Kill every worker of this node, and return at once."""
        if not self._ended.is_set():
            self._job.kill()

    def __enter__(self) -> "JobHandle":  # noqa: PYI034  # typing.Self is Python 3.11, no class derives from it
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._ended.wait()
        self._close()


class _StateWatch:
    """Builds the job's state from the agent's records, and passes them on."""

    def __init__(self, on_event: Callable[[EventRecord], None] | None) -> None:
        self._on_event = on_event
        self.state = JobState(phase="waiting", round=0, attempt=0, ranks=(), pids={})

    def handle(self, record: Record) -> None:
        """Take in one record. The thread that waits for the job calls it."""
        self.state = _advance(self.state, record)
        if self._on_event is not None:
            self._on_event(EventRecord(**{**record, "ranks": tuple(record["ranks"])}))


def _advance(state: JobState, record: Record) -> JobState:
    what, detail = record["what"], record["detail"]
    phase, ranks, pids = _PHASES.get(what, state.phase), state.ranks, state.pids
    if what == "worker_released":
        pids = {**pids, detail["local_rank"]: detail["pid"]}
    elif what == "workers_started":
        ranks = tuple(record["ranks"])
    elif what == "workers_stopped":
        pids = {}
    elif what == "job_ended":
        phase = "succeeded" if detail["succeeded"] else "failed"
    elif what == "agent_ended":
        phase, pids = "succeeded" if detail["exit_code"] == ExitCode.SUCCEEDED else "failed", {}
    return JobState(phase=phase, round=record["round"], attempt=record["attempt"], ranks=ranks, pids=pids)


def launch(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    nproc: int | str = 1,
    nodes: int | str = 1,
    endpoint: str | None = None,
    node_rank: int | None = None,
    run_id: str | None = None,
    max_restarts: int = 0,
    start_method: str = "spawn",
    env: Mapping[str, str] | None = None,
    log_dir: str | None = None,
    shutdown_timeout_s: float = 30.0,
    flags: Sequence[str] = (),
    on_event: Callable[[EventRecord], None] | None = None,
    all_results: bool = False,
    held: str | bool | None = None,
    wait: bool = True,
) -> Any:
    """Run `function(*args, **kwargs)` in every worker. This process is one node of the job.

    Args:
        function: what each worker calls. It must be possible to pickle it. With cloudpickle installed, it may be a
            lambda or a function of a notebook.
        args: positional arguments, the same for every worker.
        kwargs: keyword arguments, the same for every worker.
        nproc: workers on this node: a number, or "gpu", "cpu", "auto" as in the agent's `--nproc-per-node`.
        nodes: how many nodes take part, or "MIN:MAX". The other nodes call `launch` too.
        endpoint: HOST:PORT of the leading node, the same on all nodes. It is needed with more than one node.
        node_rank: this node's index. Node 0 leads. None: the node that has the endpoint's address leads.
        run_id: the job's id, the same on all nodes. None: a fresh one, on one node.
        max_restarts: how often workers may be restarted because one failed.
        start_method: with "spawn" or "forkserver", queues and locks of that multiprocessing context can be arguments,
            and workers start from a warm template. With "fork" workers are forks of this process, and nothing is
            pickled.
        env: the workers' environment. None: this process's.
        log_dir: the folder of log files, see `--log-dir`.
        shutdown_timeout_s: seconds between the signal that stops workers and SIGKILL.
        flags: further flags of the agent's command line.
        on_event: a function that is called with each record of the agent, in the thread that waits for the job.
        all_results: whether to return the results of the workers of every node, not only of this one. It must be the
            same on all nodes. With more than one node the environment needs MUSTER_TOKEN, a secret that is the same on
            all nodes.
        held: the hold of this machine (`muster hold`) on whose first node the job runs: its handle, or True for the
            only one. Workers then start with torch imported. None: the job starts cold.
        wait: whether to wait for the end of the job. If False, return a `JobHandle` at once; a thread waits.

    Returns:
        `Results`, which has what each worker returned, by global rank. With `wait=False` a `JobHandle`.

    Raises:
        LaunchFailed: the job did not succeed. The exception has the failures.
        PickleFault: something cannot be sent to or from the workers. The message names it.
        UsageError: a value is not allowed. It is a ValueError.
        AgentLost: the job's muster process was killed.
        ResultsMissing: the job succeeded, but results of another node did not come. The exception has this node's.
    """
    environ = dict(os.environ if env is None else env)
    count = count_workers(str(nproc), origin="nproc", env=environ, python=sys.executable)
    argv = [
        f"--nproc-per-node={count}",
        f"--max-restarts={max_restarts}",
        f"--shutdown-timeout={shutdown_timeout_s}",
        *_build_node_flags(nodes, endpoint, node_rank, run_id, held=held),
        *([f"--log-dir={log_dir}"] if log_dir else []),
        *flags,
        *build_function_words(is_held=bool(held)),
    ]
    token = _find_token(nodes, environ) if all_results else None
    server = start_function_server(function, args, kwargs or {}, nproc=count, start_method=start_method)
    watch = _StateWatch(on_event)
    try:
        node = take_node(held, name_entrypoint(function, args), nproc=count, start_method=start_method)
        job = Job(argv, environ=environ, server=server, on_record=watch.handle, held=node)
    except BaseException:  # KeyboardInterrupt too: close the call's files
        server.close()
        raise
    handle = JobHandle(job, server, watch, token)
    if not wait:
        handle.run_in_thread()
        return handle
    with handle:
        handle.run()
        return handle.wait()


def _find_token(nodes: int | str, environ: Mapping[str, str]) -> str | None:
    """Return the secret by which programs of several nodes know one another. One node needs none.

    Raises:
        UsageError: there is none.
    """
    if set(str(nodes).split(":")) == {"1"}:
        return None
    token = environ.get(Env.TOKEN)
    if not token:
        raise UsageError(
            f"all_results=True with nodes={nodes!r} needs the variable {Env.TOKEN}, a secret that is the same on all "
            "nodes, because results of other nodes are unpickled here, which can run any code"
        )
    return token


def _build_node_flags(
    nodes: int | str, endpoint: str | None, node_rank: int | None, run_id: str | None, *, held: str | bool | None
) -> list[str]:
    if str(nodes) == "1" and endpoint is None:
        return ["--standalone", *([f"--rdzv-id={run_id}"] if run_id else [])]
    if endpoint is None and held:
        raise UsageError(
            f"nodes={nodes!r}, held={held!r}: a program can run functions on one node of a hold only; for more nodes "
            "start a program with its own hold on each node, and give all of them endpoint=, HOST:PORT of the leading "
            "one"
        )
    if endpoint is None:
        raise UsageError(f"nodes={nodes!r} needs endpoint=, HOST:PORT of the leading node")
    named = {"rdzv-endpoint": endpoint, "node-rank": node_rank, "rdzv-id": run_id}
    chosen = [f"--{name}={value}" for name, value in named.items() if value is not None]
    return [f"--nnodes={nodes}", "--rdzv-backend=muster", *chosen]


def _raise_if_failed(outcome: Outcome, server: WorkerServer) -> None:
    if outcome.code == ExitCode.SUCCEEDED:
        return
    if outcome.code == ExitCode.USAGE:
        raise UsageError(outcome.error or "the agent refused its command line")
    root = find_root(outcome.report) if outcome.report is not None else None
    if root is not None:
        line = f"the job failed: {format_worker_failure(root)}"
        raise LaunchFailed(line, outcome.report, outcome.code) from build_cause(root, server.load_exception)
    if outcome.code is None or outcome.code == 128 + 9:
        raise AgentLost("the job's muster process was killed; no process of the job is left on this node")
    line = outcome.error or f"the job was stopped; the agent {describe_exit_code(outcome.code)}"
    raise LaunchFailed(line, outcome.report, outcome.code)
