"""`elastic_launch` and `launch_agent`: torch's launcher, with the agent as a process of its own."""

import contextlib
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import muster
from muster._shared.contract import ExitCode
from muster.agent.config import AgentConfig
from muster.agent.errors import UsageError
from muster.elastic.failures import LoadException, raise_for_outcome
from muster.elastic.flags import PREFIX_VARIABLE, build_flags
from muster.elastic.jobs.call import build_payload
from muster.elastic.jobs.job import Job, Outcome
from muster.elastic.jobs.process import FOLDER_MARK
from muster.elastic.jobs.results import Payload, WorkerServer
from muster.elastic.worker_group import WorkerGroupWatch

if TYPE_CHECKING:
    from muster.elastic.jobs.held import HeldNode

_FUNCTION_PROGRAM = "elastic/jobs/function.py"
_PRELOADED = (
    *("torch", "torch._dynamo", "torch.distributed", "torch.distributed.launcher.api"),
    "torch.distributed.elastic.agent.server.api",
)
"""What the template imports if this process has imported it. Workers will import the same `__main__`."""

_HEALTH_PORT_VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
_HEALTH_TIMEOUT_S = 60

START_METHODS = ("spawn", "forkserver", "fork")


class elastic_launch:  # noqa: N801  # torch's name
    """Run a function, or a command, in every worker of this node under an elastic agent, as torch's class does.

    `elastic_launch(config, entrypoint)(*args)` blocks until the job has ended. It returns what each worker of this
    node returned, by global rank, or None for each rank of a command. Any thread may call it.
    """

    def __init__(
        self,
        config: Any,
        entrypoint: Callable[..., Any] | str | None,
        health_check_server: Any = None,
        *,
        held: str | bool | None = None,
    ) -> None:
        """Keep the arguments.

        Args:
            config: a `LaunchConfig`, torch's or ours.
            entrypoint: a function that can be pickled, or a command.
            health_check_server: started before the job and stopped after it, as torch does.
            held: see `launch`. torch has no such argument.
        """
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server
        self._held = held

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Run the job. See `launch_agent` for what it raises."""
        return launch_agent(self._config, self._entrypoint, list(args), self._health_check_server, held=self._held)


def launch_agent(
    config: Any,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: Any = None,
    *,
    held: str | bool | None = None,
) -> dict[int, Any]:
    """Run one node of a job to its end.

    Args:
        config: a `LaunchConfig`, torch's or muster's. If it has no `run_id`, this function chooses one and writes it
            into it.
        entrypoint: a function or a command.
        args: its arguments. Those of a command are turned into strings. `${local_rank}` is replaced in strings.
        health_check_server: an object with `start` and `stop`. None: there is none.
        held: see `launch`. torch has no such argument.

    Returns:
        What each worker of this node returned in the round that succeeded, by global rank.

    Raises:
        ChildFailedError: workers failed and no restart is left (torch's class).
        SignalException: a signal ended the job (torch's class).
        RendezvousTimeoutError: the nodes did not find each other in time (torch's class).
        PickleFault: the function, an argument or a result cannot be pickled. The message names it.
        UsageError: a value is not allowed. It is a ValueError.
        AgentLost: the job's muster process was killed.
    """
    if not config.run_id:
        config.run_id = str(uuid.uuid4().int)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle  # as torch does
    name = name_entrypoint(entrypoint or "", args)
    watch = _watch_group(config, name)
    with serve_health_check(health_check_server):
        try:
            _, values = run_program(
                build_flags(config),
                entrypoint,
                args,
                nproc=config.nproc_per_node,
                start_method=config.start_method,
                held=held,
                check=lambda outcome, load: raise_for_outcome(outcome, name=name, load_exception=load),
                environ=_build_environ(config),
                handled_signals=split_signals(config.signals_to_handle),
                on_record=None if watch is None else watch.handle,
            )
        except Exception as error:
            if watch is not None:
                _report_error(watch, error)
            raise
        if watch is not None:
            _report_success(watch, values)
        return values


def _watch_group(config: Any, name: str) -> WorkerGroupWatch | None:
    """Return a watch, or None if torch's agent is not imported: the program then has no handlers of its events."""
    if "torch.distributed.elastic.agent.server.api" not in sys.modules:
        return None
    from torch.distributed.elastic import metrics

    metrics.initialize_metrics(metrics.MetricsConfig(config.metrics_cfg))
    spec = SimpleNamespace(
        role=config.role,
        local_world_size=config.nproc_per_node,
        max_restarts=config.max_restarts,
        event_log_handler=getattr(config, "event_log_handler", "null"),
    )
    return WorkerGroupWatch(spec, entrypoint_name=name, run_id=config.run_id, backend=config.rdzv_backend)


def _report_success(watch: WorkerGroupWatch, values: dict[int, Any]) -> None:
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

    watch.record_result(RunResult(state=WorkerState.SUCCEEDED, return_values=values))
    watch.record_job("SUCCEEDED")


def _report_error(watch: WorkerGroupWatch, error: Exception) -> None:
    """Report an error as torch does: workers that fail do not make the agent fail."""
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if isinstance(error, ChildFailedError):
        watch.record_result(RunResult(state=WorkerState.FAILED, failures=error.failures))
        watch.record_job("SUCCEEDED")
    else:
        watch.record_return(is_success=False)
        watch.record_job("FAILED")


def _build_environ(config: Any) -> dict[str, str]:
    template = config.log_line_prefix_template
    return {**os.environ, **({PREFIX_VARIABLE: template} if template else {})}


@contextlib.contextmanager
def serve_health_check(health_check_server: Any) -> Iterator[None]:
    """Start a health check server, and stop it at the end.

    torch's own server opens no port, and only logs that. A company puts its own in the place of
    `create_healthcheck_server`. It is called where torch's agent calls it, but once for a job and not for each round.

    Args:
        health_check_server: the program's. None: torch's, if the variable names a port.
    """
    server = _create_health_server() if health_check_server is None else health_check_server
    if server is None:
        yield
        return
    server.start()
    try:
        yield
    finally:
        server.stop()


def _create_health_server() -> Any:
    port = os.environ.get(_HEALTH_PORT_VARIABLE)
    if port is None or not port.strip().isdecimal():  # as with torch, which logs it
        return None
    try:
        from torch.distributed.elastic.agent.server import local_elastic_agent
    except ImportError:  # without torch, nothing to restore
        return None
    return local_elastic_agent.create_healthcheck_server(
        alive_callback=lambda: int(time.time()), port=int(port), timeout=_HEALTH_TIMEOUT_S
    )


def read_signals() -> tuple[str, ...]:
    """Return the names of the signals that a program wants to be handled, as torch's classes do."""
    return split_signals(os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", ",".join(AgentConfig.signals_to_handle)))


def split_signals(names: str) -> tuple[str, ...]:
    """Split `"SIGTERM,SIGINT"` into names."""
    return tuple(name.strip() for name in names.split(",") if name.strip())


def run_program(
    flags: Sequence[str],
    entrypoint: Callable[..., Any] | str | None,
    args: Sequence[Any],
    *,
    nproc: int,
    start_method: str,
    held: str | bool | None = None,
    check: Callable[[Outcome, LoadException | None], None] = lambda _outcome, _load: None,
    **settings: Any,
) -> tuple[Outcome, dict[int, Any]]:
    """Run a function or a command under an agent to the end.

    Args:
        flags: of the agent.
        entrypoint: see `launch_agent`.
        args: its arguments.
        nproc: workers on this node.
        start_method: one of `START_METHODS`.
        held: see `launch`.
        check: gets the outcome, and what loads the exception of a function's worker, while that is there.
        settings: of the `Job`.

    Returns:
        How the job has ended, and what its workers returned if it ended well.

    Raises:
        UsageError: there is no entrypoint, or a value is not allowed.
    """
    if entrypoint is None:
        raise UsageError("entrypoint=None: must be a function or a command")
    name = name_entrypoint(entrypoint, args)
    if isinstance(entrypoint, str):
        argv = [*flags, "--no-python", entrypoint, *map(str, args)]
        outcome = Job(argv, held=take_node(held, name, nproc=nproc, start_method="spawn"), **settings).run()
        check(outcome, None)
        return outcome, dict.fromkeys(outcome.ranks)
    with contextlib.closing(
        start_function_server(entrypoint, args, {}, nproc=nproc, start_method=start_method, substitutes_macros=True)
    ) as server:
        argv = [*flags, *build_function_words(is_held=bool(held))]
        node = take_node(held, name, nproc=nproc, start_method=start_method)
        outcome = Job(argv, server=server, held=node, **settings).run()
        check(outcome, server.load_exception)
        return outcome, collect_results(outcome, server) if outcome.code == ExitCode.SUCCEEDED else {}


def start_function_server(
    entrypoint: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    nproc: int,
    start_method: str,
    substitutes_macros: bool = False,
) -> WorkerServer:
    """Pickle the call.

    Args:
        entrypoint: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        nproc: workers on this node.
        start_method: one of `START_METHODS`.
        substitutes_macros: each worker replaces `${local_rank}` in positional arguments that are strings.

    Raises:
        UsageError: the start method is not one of ours.
        PickleFault: names what cannot be pickled.
    """
    if start_method not in START_METHODS:
        raise UsageError(f"start_method={start_method!r}: allowed are {', '.join(START_METHODS)}")
    if start_method == "fork":
        from muster.elastic.fork.hazards import prepare_call

        call = prepare_call(entrypoint, args, kwargs, nproc, substitutes_macros=substitutes_macros)
        from muster.elastic.fork.tree import fork_tree  # only where there are forks

        return WorkerServer(Payload(call_fd=-1, tracker_fd=-1), nproc, partial(fork_tree, call))
    return WorkerServer(build_payload(entrypoint, args, kwargs, substitutes_macros=substitutes_macros), nproc)


def take_node(held: str | bool | None, name: str, *, nproc: int, start_method: str) -> "HeldNode | None":
    """Take the hold that the caller means. None: the job starts cold.

    Args:
        held: see `launch`.
        name: the name of the function or command.
        nproc: the number of the job's workers.
        start_method: the job's start method.

    Raises:
        UsageError: there is no such hold, or the job cannot run on one.
        EnvironmentFault: the hold runs another job.
    """
    if held is None or held is False:
        return None
    if start_method == "fork":
        raise UsageError(
            f"held={held!r}: with start_method='fork' workers are forks of this program, and not of the hold's agent; "
            "use start_method='spawn', or no hold"
        )
    from muster.elastic.jobs.held import HeldNode  # only where there is a hold

    return HeldNode(held, name, nproc)


def build_function_words(*, is_held: bool = False) -> list[str]:
    """Return the agent's words for a program that connects to the job's `WorkerServer`.

    The job puts its folder in.
    """
    preload = [name for name in _PRELOADED if name in sys.modules or (is_held and name == "torch")]
    modules = ["multiprocessing.forkserver", "multiprocessing.spawn", "tempfile", *preload]
    program = Path(muster.__file__).parent / _FUNCTION_PROGRAM
    return [f"--preload={','.join(modules)}", str(program), FOLDER_MARK, "${local_rank}"]


def collect_results(outcome: Outcome, server: WorkerServer) -> dict[int, Any]:
    """Return the results by global rank. The result of a worker that ended well without one (`sys.exit(0)`) is None."""
    return server.load_results() or dict.fromkeys(outcome.ranks)


def name_entrypoint(entrypoint: Callable[..., Any] | str, args: Sequence[Any]) -> str:
    """Return the name that torch gives a job in ChildFailedError."""
    if callable(entrypoint):
        return str(getattr(entrypoint, "__name__", type(entrypoint).__name__))
    if entrypoint == sys.executable:
        return next((str(arg) for arg in args if not str(arg).startswith("-")), "")
    return entrypoint


def refuse_private_overrides(cls: type, names: tuple[str, ...], base: str) -> None:
    """Refuse a subclass that overrides private methods of torch's class: they are not called here.

    Raises:
        UsageError: names them.
    """
    found = [name for name in names if name in cls.__dict__]
    if found:
        raise UsageError(
            f"{cls.__module__}.{cls.__qualname__} overrides {', '.join(found)} of torch's {base}; muster's {base} has "
            "no such methods, because the agent is a process of its own"
        )
