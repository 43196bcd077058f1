"""`elastic_launch` and `launch_agent`: torch's launcher, with the agent as a process of its own."""

import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import muster
from muster.agent.errors import UsageError
from muster.elastic.failures import raise_for_outcome
from muster.elastic.flags import PREFIX_VARIABLE, build_flags
from muster.elastic.jobs.call import build_payload
from muster.elastic.jobs.job import Job, Outcome, Record
from muster.elastic.jobs.process import FOLDER_MARK
from muster.elastic.jobs.results import Payload, WorkerServer

_FUNCTION_PROGRAM = "agent/workers/function.py"
_PRELOADED = (
    *("torch", "torch._dynamo", "torch.distributed", "torch.distributed.launcher.api"),
    "torch.distributed.elastic.agent.server.api",
)
"""What the template imports if this process has: workers will import the same `__main__`."""

START_METHODS = ("spawn", "forkserver", "fork")


class elastic_launch:  # noqa: N801  # torch's name
    """Runs a function, or a command, in every worker of this node, under an elastic agent; see torch's class.

    `elastic_launch(config, entrypoint)(*args)` blocks until the job has ended, and returns what each worker of this
    node returned, by global rank; None for each rank of a command. Any thread may call it.
    """

    def __init__(
        self, config: Any, entrypoint: Callable[..., Any] | str | None, health_check_server: Any = None
    ) -> None:
        """Keep the arguments.

        Args:
            config: a `LaunchConfig`, torch's or ours.
            entrypoint: a function that can be pickled, or a command.
            health_check_server: started before the job and stopped after it, as torch does.
        """
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Run the job; see `launch_agent` for what it raises."""
        return launch_agent(self._config, self._entrypoint, list(args), self._health_check_server)


def launch_agent(
    config: Any, entrypoint: Callable[..., Any] | str | None, args: list[Any], health_check_server: Any = None
) -> dict[int, Any]:
    """Run one node of a job to its end.

    Args:
        config: a `LaunchConfig`, torch's or ours. A missing `run_id` is chosen and written there.
        entrypoint: a function or a command.
        args: its arguments; a command's are turned into strings, with `${local_rank}` replaced.
        health_check_server: has `start` and `stop`; None: there is none.

    Returns:
        What each worker of this node returned in the round that succeeded, by global rank.

    Raises:
        ChildFailedError: workers failed and no restart is left (torch's class).
        SignalException: a signal ended the job (torch's class).
        RendezvousTimeoutError: the nodes did not find each other in time (torch's class).
        PickleFault: function, arguments or a result cannot be pickled; names what.
        UsageError: a value that is not allowed; it is a ValueError.
        AgentLost: the agent or its guard was killed.
    """
    if not config.run_id:
        config.run_id = str(uuid.uuid4().int)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle  # as torch does
    if health_check_server is not None:
        health_check_server.start()
    try:
        return run_program(
            build_flags(config),
            entrypoint,
            args,
            nproc=config.nproc_per_node,
            start_method=config.start_method,
            environ=_build_environ(config),
            handled_signals=split_signals(config.signals_to_handle),
        )
    finally:
        if health_check_server is not None:
            health_check_server.stop()


def _build_environ(config: Any) -> dict[str, str]:
    template = config.log_line_prefix_template
    return {**os.environ, **({PREFIX_VARIABLE: template} if template else {})}


def split_signals(names: str) -> tuple[str, ...]:
    """`"SIGTERM,SIGINT"` as names."""
    return tuple(name.strip() for name in names.split(",") if name.strip())


def run_program(
    flags: Sequence[str],
    entrypoint: Callable[..., Any] | str | None,
    args: Sequence[Any],
    *,
    nproc: int,
    start_method: str = "spawn",
    environ: Mapping[str, str] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    handled_signals: Sequence[str] = (),
    on_record: Callable[[Record], None] | None = None,
) -> dict[int, Any]:
    """Run a function or a command under an agent to the end; see `launch_agent`."""
    if isinstance(entrypoint, str):
        words = [*flags, "--no-python", entrypoint, *map(str, args)]
        job = Job(words, environ=environ or os.environ, on_record=on_record, handled_signals=handled_signals)
        outcome = job.run()
        raise_for_outcome(outcome, name=name_entrypoint(entrypoint, args))
        return dict.fromkeys(outcome.ranks)
    if entrypoint is None:
        raise UsageError("entrypoint=None: must be a function or a command")
    server = start_function_server(entrypoint, args, kwargs or {}, nproc=nproc, start_method=start_method)
    try:
        job = Job(
            [*flags, *build_function_words()],
            environ=environ or os.environ,
            server=server,
            on_record=on_record,
            handled_signals=handled_signals,
        )
        outcome = job.run()
        raise_for_outcome(outcome, name=name_entrypoint(entrypoint, args), load_exception=server.load_exception)
        return collect_results(outcome, server)
    finally:
        server.close()


def start_function_server(
    entrypoint: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, nproc: int, start_method: str
) -> WorkerServer:
    """Pickle the call.

    Raises:
        UsageError: the start method is not one of ours.
        PickleFault: names what cannot be pickled.
    """
    if start_method not in START_METHODS:
        raise UsageError(f"start_method={start_method!r}: allowed are {', '.join(START_METHODS)}")
    if start_method == "fork":
        from muster.elastic.fork.hazards import prepare_call

        call = prepare_call(entrypoint, args, kwargs, nproc)
        from muster.elastic.fork.tree import fork_tree  # only where there are forks

        return WorkerServer(Payload(call_fd=-1, tracker_fd=-1), nproc, partial(fork_tree, call))
    return WorkerServer(build_payload(entrypoint, args, kwargs), nproc)


def build_function_words() -> list[str]:
    """The agent's words for a program that connects to the job's `WorkerServer`; the job puts its folder in."""
    preload = [name for name in _PRELOADED if name in sys.modules]
    modules = ["multiprocessing.forkserver", "multiprocessing.spawn", "tempfile", *preload]
    program = Path(muster.__file__).parent / _FUNCTION_PROGRAM
    return [f"--preload={','.join(modules)}", str(program), FOLDER_MARK, "${local_rank}"]


def collect_results(outcome: Outcome, server: WorkerServer) -> dict[int, Any]:
    """By global rank; None for a worker that ended well without a result (`sys.exit(0)`)."""
    return server.load_results() or dict.fromkeys(outcome.ranks)


def name_entrypoint(entrypoint: Callable[..., Any] | str, args: Sequence[Any]) -> str:
    """The name that torch gives a job in ChildFailedError."""
    if callable(entrypoint):
        return str(getattr(entrypoint, "__name__", type(entrypoint).__name__))
    if entrypoint == sys.executable:
        return next((str(arg) for arg in args if not str(arg).startswith("-")), "")
    return entrypoint
