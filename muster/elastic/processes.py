"""`start_processes` and its contexts: processes of one node, without rendezvous and without restarts.

Names, arguments and results are torch's. The processes are workers of an agent under its guard, as everywhere.

The arguments of torch before 2.3 and of ice-learn name files where torch's now have a `LogsSpecs`. `GivenFiles` and
`RankFolders` stand for one.
"""

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

from muster._shared.contract import ExitCode, describe_exit_code
from muster.agent.config import AgentConfig
from muster.agent.errors import UsageError
from muster.elastic.failures import build_process_failure, build_signal_exception
from muster.elastic.jobs.errors import AgentLost
from muster.elastic.jobs.job import Job, Outcome, Record, handle_signals
from muster.elastic.jobs.rank_call import RankCall
from muster.elastic.jobs.results import WorkerServer
from muster.elastic.launcher import (
    build_function_words,
    collect_results,
    read_signals,
    refuse_private_overrides,
    start_function_server,
)
from muster.elastic.tail import Screen, TailLog


class GivenFiles(NamedTuple):
    """Files that the caller has chosen, by local rank. "" is the process's own stream."""

    stdouts: dict[int, str]
    stderrs: dict[int, str]
    tee_stdouts: dict[int, str]
    tee_stderrs: dict[int, str]
    error_files: dict[int, str]

    def reify(self, envs: Mapping[int, dict[str, str]]) -> Any:  # noqa: ARG002  # torch's; the caller has set them
        """Return torch's LogsDest."""
        from torch.distributed.elastic.multiprocessing.api import LogsDest

        return LogsDest(**self._asdict())


class RankFolders(NamedTuple):
    """`<log_dir>/<local_rank>/{stdout.log,stderr.log,error.json}`."""

    log_dir: str
    redirects: Any
    tee: Any

    def reify(self, envs: Mapping[int, dict[str, str]]) -> Any:
        """Make the folders, name the error files in `envs`, and return torch's LogsDest.

        Raises:
            FileNotFoundError: there is no `log_dir`.
            RuntimeError: it is not empty. The text is torch's.
        """
        from torch.distributed.elastic.multiprocessing.api import Std, to_map

        if os.listdir(self.log_dir):
            raise RuntimeError(f"log_dir: {self.log_dir} is not empty, please provide an empty log_dir")
        tees = to_map(self.tee or Std.NONE, len(envs))
        redirects = to_map(self.redirects or Std.NONE, len(envs))
        files = GivenFiles({}, {}, {}, {}, {})
        for local_rank in envs:
            folder = os.path.join(self.log_dir, str(local_rank))
            os.mkdir(folder)
            files.error_files[local_rank] = os.path.join(folder, "error.json")
            envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = files.error_files[local_rank]
            for std, name, written, printed in (
                (Std.OUT, "stdout.log", files.stdouts, files.tee_stdouts),
                (Std.ERR, "stderr.log", files.stderrs, files.tee_stderrs),
            ):
                path = os.path.join(folder, name)
                is_printed = tees[local_rank] & std == std
                written[local_rank] = path if is_printed or redirects[local_rank] & std == std else ""
                if is_printed:
                    printed[local_rank] = path
        return files.reify(envs)


class FunctionSettings(NamedTuple):
    """torch's arguments of MultiprocessContext after `envs`."""

    start_method: str
    logs_specs: Any
    log_line_prefixes: Mapping[int, str] | None = None
    numa_options: Any = None
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    progbar_events: Mapping[str, Any] | None = None

    def omit_start_method(self) -> dict[str, Any]:
        """Return the arguments of `PContext`, by name."""
        return {name: value for name, value in self._asdict().items() if name != "start_method"}


class _OlderSettings(NamedTuple):
    stdouts: dict[int, str]
    stderrs: dict[int, str]
    tee_stdouts: dict[int, str]
    tee_stderrs: dict[int, str]
    error_files: dict[int, str]
    start_method: str
    progbar_events: Mapping[str, Any] | None = None


def read_settings(rest: Sequence[Any], named: Mapping[str, Any], *, is_command: bool = False) -> FunctionSettings:
    """Read what follows `envs`, by position and by name. For a command it has no start method.

    Raises:
        TypeError: it fits neither signature.
    """
    # The first of the older arguments is a mapping of files.
    is_older = isinstance(rest[0], Mapping) if rest else "stdouts" in named
    kind: Any = _OlderSettings if is_older else FunctionSettings
    at = kind._fields.index("start_method")
    if not is_command:
        found = kind(*rest, **named)
    elif len(rest) < at:
        found = kind(*rest, **named, start_method="spawn")
    else:
        found = kind(*rest[:at], "spawn", *rest[at:], **named)
    if isinstance(found, FunctionSettings):
        return found
    return FunctionSettings(found.start_method, GivenFiles(*found[:5]), progbar_events=found.progbar_events)


def validate_ranks(mapping: Mapping[int, Any], nprocs: int, what: str) -> None:
    """Check that the keys are 0 to n-1.

    Raises:
        RuntimeError: they are not. The text is torch's.
    """
    actual, expected = set(mapping), set(range(nprocs))
    if actual != expected:
        raise RuntimeError(f"{what}, local rank mapping mismatch, expected: {expected}, actual: {actual}")


def check_program(program: str, env: Mapping[str, str]) -> None:
    """Check that a program can be found and executed.

    Raises:
        FileNotFoundError: it cannot be found.
        PermissionError: it may not be executed.
    """
    folders = [""] if os.path.dirname(program) else os.get_exec_path(env)
    found = [path for folder in folders if os.path.exists(path := os.path.join(folder, program))]
    if not found:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), program)
    if not any(os.path.isfile(path) and os.access(path, os.X_OK) for path in found):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), program)


IS_WINDOWS = sys.platform == "win32"
_KILL_LIMIT_S = 35.0
"""The limit after a kill: the guard's own for processes that cannot be killed, and a margin."""


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: Mapping[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    logs_specs: Any = None,
    log_line_prefixes: Any = None,
    start_method: Any = "spawn",
    numa_options: Any = None,
    duplicate_stdout_filters: Any = None,
    duplicate_stderr_filters: list[str] | None = None,
    *,
    log_dir: str | None = None,
    redirects: Any = None,
    tee: Any = None,
    progbar_events: Mapping[str, Any] | None = None,
) -> "PContext":
    """Start one process per local rank, as torch's function does.

    It accepts two signatures, and tells them apart by the type of the fifth argument. One is torch's. The other, of
    torch before 2.3 and of ice-learn, is `(name, entrypoint, args, envs, log_dir, start_method, redirects, tee,
    progbar_events)`. With the latter, files are `<log_dir>/<local_rank>/{stdout.log,stderr.log,error.json}`.

    Returns:
        The context of the processes, which have been started. The caller closes it.

    Raises:
        RuntimeError: the keys of `args` or `envs` are not 0 to n-1, or `log_dir` is not empty.
        PickleFault: the function or an argument cannot be pickled. The message names it.
        UsageError: a value is not allowed. It is a ValueError.
        EnvironmentFault: the agent cannot be started.
    """
    validate_ranks(args, len(args), "args")
    validate_ranks(envs, len(args), "envs")
    if isinstance(logs_specs, str) and isinstance(log_line_prefixes, str):  # the older signature, by position
        log_dir, start_method, redirects, tee, progbar_events = (
            logs_specs,
            log_line_prefixes,
            redirects if isinstance(start_method, str) else start_method,
            tee if numa_options is None else numa_options,
            progbar_events if duplicate_stdout_filters is None else duplicate_stdout_filters,
        )
        log_line_prefixes = numa_options = duplicate_stdout_filters = None
    elif isinstance(logs_specs, str):
        log_dir = logs_specs
    shared = {
        "name": name,
        "entrypoint": entrypoint,
        "args": args,
        "envs": envs,
        "logs_specs": RankFolders(log_dir, redirects, tee) if log_dir is not None else logs_specs,
        "log_line_prefixes": log_line_prefixes,
        "numa_options": numa_options,
        "duplicate_stdout_filters": duplicate_stdout_filters,
        "duplicate_stderr_filters": duplicate_stderr_filters,
        "progbar_events": progbar_events,
    }
    if shared["logs_specs"] is None:
        raise UsageError("start_processes: give logs_specs, or log_dir")
    context: PContext
    if isinstance(entrypoint, str):
        context = SubprocessContext(**shared)
    else:
        context = MultiprocessContext(start_method=start_method, **shared)
    try:
        context.start()
    except BaseException:  # KeyboardInterrupt too: leave nothing behind
        context.close()
        raise
    return context


class PContext:
    """Processes that were started together and end together. Close it after use."""

    start_method = "spawn"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_private_overrides(
            cls, ("_start", "_poll", "_close", "_is_done", "_capture_process_failures"), "PContext"
        )

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: Mapping[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: Any,
        log_line_prefixes: Mapping[int, str] | None = None,
        numa_options: Any = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
        *,
        progbar_events: Mapping[str, Any] | None = None,
    ) -> None:
        """Ask `logs_specs` where the logs go. Nothing is started before `start`. `progbar_events`: see `Screen`."""
        self.name = name
        dest = logs_specs.reify(envs)
        validate_ranks(dest.stdouts, len(args), "stdouts")
        validate_ranks(dest.stderrs, len(args), "stderrs")
        self.entrypoint = entrypoint
        self.args = args
        self.envs = envs
        self.stdouts: dict[int, str] = dest.stdouts
        self.stderrs: dict[int, str] = dest.stderrs
        self.error_files: dict[int, str] = dest.error_files
        self.nprocs = len(args)
        self._numa_options = numa_options
        self._filtered: list[TextIO] = []
        screen = Screen(progbar_events)
        self._tail_logs = [
            TailLog(name, dest.tee_stdouts, sys.stdout, log_line_prefixes, screen=screen),
            TailLog(name, dest.tee_stderrs, sys.stderr, log_line_prefixes, screen=screen),
        ]
        self._filter(dest.tee_stdouts, dest.filtered_stdout, duplicate_stdout_filters, log_line_prefixes)
        self._filter(dest.tee_stderrs, dest.filtered_stderr, duplicate_stderr_filters, log_line_prefixes)
        self._job: Job | None = None
        self._server: WorkerServer | None = None
        self._outcome: Outcome | None = None
        self._result: Any = None
        self._pids: dict[int, int] = {}
        self._exit_codes: dict[int, int] = {}
        self._changed = threading.Condition()
        self._has_ended = False
        self._was_stopped = False

    def _filter(
        self, files: Mapping[int, str], path: str, needles: list[str] | None, prefixes: Mapping[int, str] | None
    ) -> None:
        if not needles:
            return
        file = open(path, "w", errors="replace", buffering=1, encoding="utf-8")  # noqa: SIM115  # closed by `close`
        self._filtered.append(file)
        wanted = tuple(needles)
        self._tail_logs.append(
            TailLog(self.name, files, file, prefixes, log_line_filter=lambda line: any(text in line for text in wanted))
        )

    # -- starting ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the processes. The caller's signal handlers stay as they are, see `wait`.

        Raises:
            ValueError: it was called before.
        """
        if self._job is not None:
            raise ValueError("The process context already initialized. Most likely the start method got called twice.")
        call = RankCall(
            entrypoint=self.entrypoint,
            args=dict(self.args),
            envs=self.envs,
            stdouts=self.stdouts,
            stderrs=self.stderrs,
            environ=dict(os.environ),
        )
        self._server = start_function_server(call, (), {}, nproc=self.nprocs, start_method=self.start_method)
        binding = getattr(self._numa_options, "affinity_mode", None)
        flags = ["--standalone", f"--nproc-per-node={self.nprocs}", f"--role={self.name}"]
        flags += [f"--numa-binding={getattr(binding, 'value', binding)}"] if binding is not None else []
        self._job = Job(
            [*flags, "--log-dir=/dev/null", *build_function_words()],
            environ=os.environ,
            server=self._server,
            on_record=self._handle_record,
        )
        for tail in self._tail_logs:
            tail.start()
        threading.Thread(target=self._run, args=(self._job,), name=f"muster-{self.name}", daemon=True).start()

    def _run(self, job: Job) -> None:
        try:
            self._outcome = job.run()
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _handle_record(self, record: Record) -> None:
        if record["what"] == "worker_released":
            with self._changed:
                self._pids[record["detail"]["local_rank"]] = record["detail"]["pid"]
                self._changed.notify_all()
        elif record["what"] == "worker_exited":
            self._exit_codes.update(dict.fromkeys(record["ranks"], record["detail"]["code"]))

    def pids(self) -> dict[int, int]:
        """Return the processes by local rank, and wait until all exist, or the context has ended."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._pids) == self.nprocs or self._has_ended)
            return dict(sorted(self._pids.items()))

    # -- waiting ----------------------------------------------------------------------------------------------------

    def wait(self, timeout: float = -1, period: float = 1) -> Any:  # noqa: ARG002  # nothing is polled
        """Wait until all processes have ended well or one has failed. Then stop the others.

        During a wait in the main thread, a signal that would end this process raises torch's SignalException instead.
        Handlers of the caller's own stay.

        Args:
            timeout: seconds. 0 looks once, and a negative value waits without a limit.
            period: has no effect.

        Returns:
            torch's RunProcsResult. None: the time has passed.

        Raises:
            AgentLost: the job's muster process was killed.
            PickleFault: a result cannot be loaded here.
        """
        with handle_signals(read_signals(), _raise), self._changed:
            if not self._changed.wait_for(lambda: self._has_ended, None if timeout < 0 else timeout):
                return None
        if self._result is None:
            self._result = self._build_result()
            self.close()
        return self._result

    def _build_result(self) -> Any:
        from torch.distributed.elastic.multiprocessing.api import RunProcsResult

        outcome, server = self._outcome, self._server
        if outcome is None or server is None:
            raise AgentLost("the processes' agent could not be watched to its end")
        files = {"stdouts": self.stdouts, "stderrs": self.stderrs}
        if outcome.code == ExitCode.SUCCEEDED:
            return RunProcsResult(return_values=collect_results(outcome, server), **files)
        return RunProcsResult(failures=self._build_failures(outcome), **files)

    def _build_failures(self, outcome: Outcome) -> dict[int, Any]:
        if outcome.report is None and self._was_stopped:
            return self._build_stopped()
        if outcome.report is None:
            ended = "was killed" if outcome.code is None else describe_exit_code(outcome.code)
            how = outcome.error or f"the agent {ended}"
            raise AgentLost(f"{how}; none of the processes is left")
        # As torch: of functions the first, of commands also those stopped.
        failures = outcome.report.failures if isinstance(self.entrypoint, str) else outcome.report.failures[:1]
        return {
            failure.local_rank: build_process_failure(failure, self.error_files.get(failure.local_rank))
            for failure in failures
        }

    def _build_stopped(self) -> dict[int, Any]:
        """Return torch's ProcessFailure of each process that `close` has ended, or that was not started by then."""
        from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

        # Global ranks are local ranks.
        codes = {rank: self._exit_codes.get(rank, -signal.SIGTERM) for rank in range(self.nprocs)}
        return {
            rank: ProcessFailure(
                local_rank=rank, pid=self._pids.get(rank, 0), exitcode=code, error_file=self.error_files.get(rank, "")
            )
            for rank, code in codes.items()
            if code != 0
        }

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """Stop what still runs, print the rest of the logs, release everything. Idempotent.

        Args:
            death_sig: the signal that workers get. None: SIGTERM.
            timeout: seconds until SIGKILL.
        """
        if self._job is not None and not self._has_ended:
            self._was_stopped = True
            self._stop(self._job, death_sig or signal.SIGTERM, timeout)
        for tail in self._tail_logs:
            tail.stop()
        for file in self._filtered:
            file.close()
        if self._server is not None and self._has_ended and self._result is not None:
            self._server.close()

    def _stop(self, job: Job, death_sig: int, timeout: int) -> None:
        """Stop politely, then kill. A signal that does not end an agent counts as SIGTERM."""
        if signal.Signals(death_sig).name not in AgentConfig.signals_to_handle:
            death_sig = signal.SIGTERM
        job.stop(death_sig)
        with self._changed:
            if self._changed.wait_for(lambda: self._has_ended, timeout):
                return
        job.kill()
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended, _KILL_LIMIT_S)


class MultiprocessContext(PContext):
    """Processes that call a function."""

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any],
        args: Mapping[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        *rest: Any,
        **named: Any,
    ) -> None:
        """See `PContext`. It accepts two signatures, and tells them apart by the fifth argument's type or the keywords.

        torch's goes on with `start_method, logs_specs, log_line_prefixes, numa_options, duplicate_stdout_filters,
        duplicate_stderr_filters`. That of torch before 2.3 and of ice-learn goes on with `stdouts, stderrs,
        tee_stdouts, tee_stderrs, error_files, start_method, progbar_events`.

        Raises:
            TypeError: the arguments fit neither.
        """
        settings = read_settings(rest, named)
        super().__init__(name, entrypoint, args, envs, **settings.omit_start_method())
        self.start_method = settings.start_method


class SubprocessContext(PContext):
    """Processes that run a command."""

    def __init__(
        self,
        name: str,
        entrypoint: str,
        args: Mapping[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        *rest: Any,
        **named: Any,
    ) -> None:
        """Do as `MultiprocessContext`, without `start_method` in both signatures."""
        super().__init__(
            name, entrypoint, args, envs, **read_settings(rest, named, is_command=True).omit_start_method()
        )

    def start(self) -> None:
        """See `PContext`.

        Raises:
            FileNotFoundError: there is no such program. As in torch, it is raised before any process starts.
            PermissionError: it may not be executed.
        """
        for env in self.envs.values():
            check_program(str(self.entrypoint), {**os.environ, **env})
        super().start()


def _raise(signum: int, _frame: object) -> None:
    raise build_signal_exception(signum)
