"""`LocalElasticAgent`: an agent process behind torch's signature, or that of older torch and of ice-learn."""

import contextlib
import os
import warnings
from typing import Any, NamedTuple

from muster._shared.contract import Env, ExitCode
from muster._shared.guard import STOP_LIMIT_VARIABLE
from muster.agent.errors import UsageError
from muster.elastic.events import Events, IceEvents, begin_job
from muster.elastic.failures import build_process_failures, build_signal_exception, raise_for_outcome
from muster.elastic.flags import PREFIX_VARIABLE, build_log_flags, build_worker_flags
from muster.elastic.jobs.job import Outcome
from muster.elastic.launcher import (
    name_entrypoint,
    read_signals,
    refuse_private_overrides,
    run_program,
    serve_health_check,
)
from muster.elastic.rendezvous import BACKEND, CallersRendezvous, build_static_flags
from muster.elastic.tail import Screen
from muster.elastic.worker_group import WorkerGroupWatch

_PRIVATE: tuple[str, ...] = (
    *("_start_workers", "_stop_workers", "_monitor_workers", "_shutdown", "_rendezvous", "_assign_worker_ranks"),
    *("_initialize_workers", "_restart_workers", "_invoke_run", "_exit_barrier", "_setup_local_watchdog"),
    *("_setup_healthcheck", "_record_worker_events", "_membership_changed", "_get_worker_state"),
)
"""Methods of torch's agent that subclasses (dlrover's, DeepSpeed's) override."""

DEFAULT_ROLE = "default"


class _Settings(NamedTuple):
    """Torch's arguments after the first one."""

    logs_specs: Any = None
    start_method: str = "spawn"
    exit_barrier_timeout: float = 300
    log_line_prefix_template: str | None = None
    shutdown_timeout: int = 30
    health_check_server: Any = None
    uninterruptible_state_timeout: float | None = None


class _OlderSettings(NamedTuple):
    """The arguments of torch before 2.3 and of ice-learn, which adds `events`."""

    start_method: str = "spawn"
    exit_barrier_timeout: float = 300
    log_dir: str | None = None
    events: Any = None


class LocalElasticAgent:
    """Runs the workers of one node. The agent itself is a process of its own. Any thread may use it.

        agent = LocalElasticAgent(WorkerSpec(role="trainer", local_world_size=2, entrypoint=train, args=("a",)))
        result = agent.run()
        result.return_values[0]                       # what global rank 0 returned

    It accepts two signatures, and tells them apart by the second argument's type or by the keywords. torch's is `(spec,
    logs_specs, start_method, exit_barrier_timeout, log_line_prefix_template, shutdown_timeout, health_check_server,
    uninterruptible_state_timeout)`. That of torch before 2.3 and of ice-learn is `(spec, start_method,
    exit_barrier_timeout, log_dir, events)`.

    `exit_barrier_timeout` has no effect, because the agents agree on the end. A value other than torch's default causes
    a warning. `uninterruptible_state_timeout` is how many seconds a stop waits for processes that the kernel
    cannot end.
    TORCHELASTIC_ENABLE_FILE_TIMER=1 serves torch's file timers.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_private_overrides(cls, _PRIVATE, "LocalElasticAgent")

    def __init__(self, spec: Any, *args: Any, **kwargs: Any) -> None:
        """Keep the settings. `run` starts the job.

        Raises:
            TypeError: the arguments fit neither signature.
        """
        self._spec = spec
        self._log_dir: str | None = None
        self._ice: IceEvents | None = None
        self._events: Any = None
        self._screen: Screen | None = None
        if (args and isinstance(args[0], str)) or kwargs.keys() & {"log_dir", "events"}:
            older = _OlderSettings(*args, **kwargs)
            self._log_dir = older.log_dir
            self._settings = _Settings(start_method=older.start_method, exit_barrier_timeout=older.exit_barrier_timeout)
            if older.events is not None:
                self._screen = Screen()
                self._events = older.events
                self._ice = IceEvents(older.events, self._screen)
        else:
            self._settings = _Settings(*args, **kwargs)
        if self._settings.exit_barrier_timeout != _Settings().exit_barrier_timeout:
            warnings.warn(
                f"exit_barrier_timeout={self._settings.exit_barrier_timeout} has no effect: every agent waits until "
                "all nodes have ended, or one is lost",
                stacklevel=2,
            )
        self._static_flags = build_static_flags(spec)
        asks = isinstance(self._events, Events) and self._static_flags is not None
        if asks and spec.rdzv_handler.world_size > 1 and Env.TOKEN not in os.environ:
            raise UsageError(
                f"events with {spec.rdzv_handler.world_size} nodes need the variable {Env.TOKEN}, a secret that is the "
                "same on all nodes"
            )
        handler = spec.rdzv_handler
        name = getattr(spec.entrypoint, "__qualname__", None) or name_entrypoint(spec.entrypoint, spec.args)
        self._watch = WorkerGroupWatch(
            spec,
            entrypoint_name=name,
            run_id="none" if handler is None else handler.get_run_id(),
            backend="muster" if handler is None else handler.get_backend(),
        )

    # -- torch's public methods -------------------------------------------------------------------------------------

    def run(self, role: str = DEFAULT_ROLE) -> Any:  # noqa: ARG002  # torch's; the spec has the role
        """Run the workers to the job's end.

        Returns:
            torch's RunResult: what the workers returned, or their failures, by global rank.

        Raises:
            SignalException: a signal ended the job (torch's class).
            RendezvousTimeoutError: the nodes did not find each other in time (torch's class).
            PickleFault: the function, an argument or a result cannot be pickled. The message names it.
            UsageError: a value is not allowed. It is a ValueError.
            AgentLost: the job's muster process was killed.
        """
        try:
            result = self._run()
        except Exception:
            self._watch.record_return(is_success=False)
            raise
        self._watch.record_result(result)
        return result

    def _run(self) -> Any:
        from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

        self._watch.begin()
        with contextlib.ExitStack() as stack:
            stack.enter_context(serve_health_check(self._settings.health_check_server))
            if self._ice is not None:
                self._ice.start()
                stack.callback(self._ice.close)
            outcome, values = self._run_job()
        if self._ice is not None and outcome.signum is not None:
            raise build_signal_exception(outcome.signum)  # also when workers stopped as asked
        if outcome.code == ExitCode.SUCCEEDED:
            return RunResult(state=WorkerState.SUCCEEDED, return_values=values)
        return RunResult(state=WorkerState.FAILED, failures=self._build_failures(outcome))

    def _run_job(self) -> tuple[Outcome, dict[int, Any]]:
        """Return how the job has ended, and what its workers returned if it ended well."""
        spec = self._spec
        return run_program(
            self._build_flags(),
            spec.entrypoint,
            spec.args,
            nproc=spec.local_world_size,
            start_method=self._settings.start_method,
            environ=self._build_environ(),
            rendezvous=self._build_rendezvous(),
            on_record=self._watch.handle,
            handled_signals=read_signals(),
            on_signal=None if self._ice is None else self._ice.stop_politely,
            screen=self._screen,
        )

    def _build_failures(self, outcome: Outcome) -> dict[int, Any]:
        if outcome.signum is None and outcome.report is not None and outcome.report.failures:
            return build_process_failures(outcome)
        raise_for_outcome(outcome, name=name_entrypoint(self._spec.entrypoint, self._spec.args))
        return {}

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> Any:  # noqa: ARG002  # torch's
        """Return torch's WorkerGroup as it is now."""
        return self._watch.group

    def get_event_succeeded(self) -> Any:
        """Return torch's Event for a job that has succeeded."""
        return self._watch.build_job_event("SUCCEEDED")

    def get_event_failed(self) -> Any:
        """Return torch's Event for a job that has failed, with the traceback of the exception that is being handled."""
        return self._watch.build_job_event("FAILED")

    # -- the agent's command line and records -----------------------------------------------------------------------

    def _build_flags(self) -> list[str]:
        spec, settings = self._spec, self._settings
        if self._static_flags is not None:
            rendezvous_flags = self._static_flags
        elif spec.rdzv_handler is not None:
            rendezvous_flags = [f"--rdzv-backend={BACKEND}", f"--rdzv-id={spec.rdzv_handler.get_run_id()}"]
        elif spec.master_port:
            rendezvous_flags = [f"--master-addr={spec.master_addr or '127.0.0.1'}", f"--master-port={spec.master_port}"]
            rendezvous_flags.append("--rdzv-backend=static")
        else:
            rendezvous_flags = ["--standalone", *([f"--local-addr={spec.master_addr}"] if spec.master_addr else [])]
        specs = settings.logs_specs
        logs = build_log_flags(specs) if specs is not None else self._build_older_log_flags()
        return [*build_worker_flags(spec), *rendezvous_flags, *logs, f"--shutdown-timeout={settings.shutdown_timeout}"]

    def _build_rendezvous(self) -> CallersRendezvous | None:
        spec = self._spec
        if spec.rdzv_handler is None or self._static_flags is not None:
            return None
        return CallersRendezvous(
            spec.rdzv_handler,
            nproc=spec.local_world_size,
            role=spec.role,
            local_addr=spec.local_addr,
            master_addr=spec.master_addr,
            master_port=spec.master_port,
        )

    def _build_older_log_flags(self) -> list[str]:
        from muster.elastic.flags import format_std

        spec = self._spec
        flags = [f"--log-dir={self._log_dir}"] if self._log_dir else []
        for name in ("redirects", "tee"):
            choice = getattr(spec, name, None)
            flags += [f"--{name}={format_std(choice)}"] if choice else []
        return flags

    def _build_environ(self) -> dict[str, str]:
        template, limit_s = self._settings.log_line_prefix_template, self._settings.uninterruptible_state_timeout
        environ = {
            **os.environ,
            **({PREFIX_VARIABLE: template} if template else {}),
            **({STOP_LIMIT_VARIABLE: str(limit_s)} if limit_s is not None else {}),
        }
        begin_job(self._events, environ)
        return environ
