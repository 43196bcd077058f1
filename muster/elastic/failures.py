"""From the agent's outcome to what torch's launcher raises: ChildFailedError, SignalException, rendezvous errors."""

import os
import signal
from collections.abc import Callable
from typing import Any

from muster._shared.contract import ExitCode, describe_exit_code
from muster._shared.reports import Failure
from muster.agent.diagnosis.root_cause import find_root
from muster.agent.errors import UsageError
from muster.elastic.jobs.errors import AgentLost, WorkerFailed
from muster.elastic.jobs.job import Outcome, Record

LoadException = Callable[[int], BaseException | None]
"""From a global rank of this node to the exception that its worker sent."""


def raise_for_outcome(outcome: Outcome, *, name: str, load_exception: LoadException | None = None) -> None:
    """Raise what torch's launcher raises for this outcome. Raise nothing if the job succeeded.

    Args:
        outcome: of the job, on this node.
        name: of the program, for the exception's text.
        load_exception: for function workers. The root cause's exception becomes `__cause__`.

    Raises:
        ChildFailedError: workers failed (torch's class).
        SignalException: a signal to this process ended the job, or all ranks have stopped at one step because another
            node got one or a person asked for it (torch's class).
        RendezvousTimeoutError: the nodes did not find each other in time (torch's class).
        UsageError: the agent refused its configuration. It is a ValueError.
        AgentLost: the job's muster process was killed.
    """
    if outcome.code == ExitCode.SUCCEEDED:
        return
    if outcome.code == ExitCode.USAGE:
        raise UsageError(outcome.error or "the agent refused its command line")
    if outcome.signum is not None:
        raise build_signal_exception(outcome.signum)
    if outcome.code == ExitCode.RENDEZVOUS:
        from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

        raise RendezvousTimeoutError(outcome.error or "the nodes did not find each other in time")
    if outcome.report is not None and outcome.report.failures:
        root = find_root(outcome.report) or outcome.report.failures[0]
        raise build_child_failed_error(outcome, name) from build_cause(root, load_exception)
    if outcome.error is not None:
        raise AgentLost(outcome.error)
    if outcome.code == ExitCode.TERMINATED and any(_has_drained(record) for record in outcome.records):
        raise build_signal_exception(signal.SIGTERM)
    ended = "job's muster process was killed" if outcome.code is None else f"agent {describe_exit_code(outcome.code)}"
    raise AgentLost(f"the {ended}; no process of the job is left on this node")


def _has_drained(record: Record) -> bool:
    return record["what"] == "job_ended" and bool(record["detail"].get("drained"))


def build_signal_exception(signum: int) -> Exception:
    """Return torch's SignalException for a signal that ended the job."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    sigval = signal.Signals(signum)
    found: Exception = SignalException(f"Process {os.getpid()} got signal: {sigval}", sigval=sigval)
    return found


def build_child_failed_error(outcome: Outcome, name: str) -> Exception:
    """Return torch's ChildFailedError with this node's failures.

    If no worker failed here, it has the job's root cause.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    found: Exception = ChildFailedError(name=name, failures=build_process_failures(outcome))
    return found


def build_process_failures(outcome: Outcome) -> dict[int, Any]:
    """Return torch's ProcessFailure by global rank, the root cause first.

    Workers that the agent stopped because of another's failure are left out, as in torch's function mode.
    """
    assert outcome.report is not None  # noqa: S101  # only a failed job has failures
    root = find_root(outcome.report) or outcome.report.failures[0]
    own = [each for each in outcome.report.failures if each.global_rank in outcome.ranks and not each.stopped_by_us]
    if root in own or not own:
        own = [root, *(each for each in own if each is not root)]
    failures = {failure.global_rank: build_process_failure(failure) for failure in own}
    first_s = failures[own[0].global_rank].timestamp
    for failure in failures.values():  # torch compares whole seconds
        failure.timestamp = max(failure.timestamp, first_s)
    return failures


def build_process_failure(failure: Failure, error_file: str | None = None) -> Any:
    """Return torch's ProcessFailure of one worker.

    Its message is read from the error file, if there is one.

    Args:
        failure: of the worker.
        error_file: where the worker was told to write its exception. None: where the agent told it to.
    """
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    exitcode = failure.exit_code
    if exitcode is None:
        exitcode = -signal.Signals[failure.signal or "SIGKILL"] if _is_known(failure.signal) else 1
    found = ProcessFailure(
        local_rank=failure.local_rank,
        pid=failure.pid,
        exitcode=int(exitcode),
        error_file=error_file or failure.error_file or "",
    )
    found.timestamp = int(failure.time_s)
    if found.error_file == "<N/A>" and (failure.exception or failure.reason):
        found.message = failure.traceback or failure.exception or failure.reason
    return found


def _is_known(name: str | None) -> bool:
    return name in signal.Signals.__members__


def build_cause(root: Failure, load_exception: LoadException | None) -> BaseException:
    """Return the exception that the worker raised, with the worker's traceback as its own cause.

    If the exception did not come, return one that has a line in its place.
    """
    error = load_exception(root.global_rank) if load_exception is not None else None
    if error is None:
        return WorkerFailed(format_worker_failure(root))
    return error


def format_worker_failure(failure: Failure) -> str:
    """Return one line: which worker, and why."""
    how = failure.exception or failure.describe_end()
    return f"rank {failure.global_rank} (local rank {failure.local_rank} on {failure.host}): {how}"
