"""Reports how the job ended: on the console, in report.json, torch's error file and the termination log."""

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from muster._shared.contract import ExitCode, LogNames
from muster._shared.processes import read_peak_bytes
from muster._shared.records import replace
from muster._shared.reports import format_duration, format_size
from muster.agent.config import AgentConfig, StdChoice
from muster.agent.features import SINKS
from muster.agent.logs import LogRouter
from muster.agent.node.actions import Finish
from muster.agent.rendezvous.interface import JobEnded
from muster.agent.runtime.event_log import RunTimes
from muster.agent.runtime.loop import run_limited

if TYPE_CHECKING:
    from muster._shared.reports import Report
    from muster.agent.round import Round

_WRITE_LIMIT_S = 2.0
"""How long each report may take, because the agent's end must not wait for a disk that hangs."""

COMMON_EXIT_S = 0.5
"""Agents in containers exit this long after they have learned of the job's failure. By then every report is written."""
LATER_EXIT_S = 2.0
"""How much later pods exit that do not print the report, so that a kubelet can first see the end of the one that does.

They may be removed while they wait: the longer they wait, the more often.
"""
WITNESS_END_S = 30.0
"""How long a witness of a feature may take after the job has failed (`SinkRow.is_awaited`)."""
_OUTPUT_CAP_S = 10.0
_POD_OUTPUT_CAP_S = 1.0
"""How long the report may wait for the console to show the workers' last lines."""


def report_outcome(finish: Finish, config: AgentConfig, logs: LogRouter, times: RunTimes, last: "Round | None") -> int:
    """Print and write the reports and the job's last line; return the agent's exit code.

    Nothing here may prevent the agent's end: a file that cannot be written is named in one line.

    Args:
        finish: how the job ends.
        config: the agent's.
        logs: where it prints.
        times: this agent's.
        last: the last round this node took part in; None if there was none.
    """
    logs.hide_status()
    if finish.rendezvous_failed is not None and finish.code in (ExitCode.RENDEZVOUS, ExitCode.USAGE):
        logs.print_line(finish.rendezvous_failed.reason)
        _write_termination_log(config, finish.rendezvous_failed.reason.encode(), logs)
    if finish.ended is not None and finish.ended.report is not None:
        _write_reports(finish.ended.report, config, logs)
        if finish.ended.prints_report:
            logs.wait_for_output(_POD_OUTPUT_CAP_S if config.is_pod else _OUTPUT_CAP_S)  # a reader's last line
            logs.print_text(format_page(finish.ended.report, config, logs, last, has_colour=logs.has_colour))
    if prints_last_line(finish, config, last):
        if config.counts_since:
            logs.print_line(
                f"the numbers below count since {config.counts_since} started; `muster timeline` counts the whole job"
            )
        _print_summary(logs)
        logs.print_line(describe_job(times, config, logs.run_dir, finish.ended))
    return int(finish.code)


def _print_summary(logs: LogRouter) -> None:
    """Print the summary of a job whose status is known."""
    if logs.status is None:
        return
    from muster._shared.console.summary import format_summary

    for line in format_summary(logs.status):
        logs.print_line(line)


def prints_last_line(finish: Finish, config: AgentConfig, last: "Round | None") -> bool:
    """Return whether this node prints the last line: it leads or is the first, or ran workers until a signal."""
    ended, is_first_node = finish.ended, last is not None and last.group_rank == 0
    if ended is None:
        return finish.code > ExitCode.of_signal(0) and is_first_node and config.control_fd is None
    if config.control_fd is not None and int(finish.code) == 0:
        return False  # reported to the driving program
    if ended.is_leader is not None:
        return ended.is_leader
    return ended.prints_report if ended.report is not None else is_first_node


def format_page(
    report: "Report", config: AgentConfig, logs: LogRouter, last: "Round | None", *, has_colour: bool
) -> str:
    """Format the report as this node prints it."""
    from muster.agent.diagnosis.report_text import format_report

    printed_as = _find_printed(report, config, logs, last)
    return format_report(report, has_colour=has_colour, printed_as=printed_as, columns=config.report_columns)


def _find_printed(report: "Report", config: AgentConfig, logs: LogRouter, last: "Round | None") -> str | None:
    """Return the prefix under which this console shows the output of the root cause's rank; None if it does not."""
    from muster.agent.diagnosis.root_cause import find_root
    from muster.agent.diagnosis.tracebacks import has_printed

    root = find_root(report)
    if root is None or last is None or root.round != last.number:
        return None
    is_here = root.node == last.group_rank
    if not is_here and not config.stops_together:
        return None  # on another console
    offset = root.global_rank - root.local_rank
    own = replace(last, group_rank=root.node, node_index=root.node_index, rank_offset=offset)
    prefix = logs.find_stderr_prefix(root.local_rank, own)
    prefix = (logs.find_merged_prefix(root.local_rank) if is_here else None) or prefix
    if not prefix:  # not read by the agent: Python prints it, crashes are in a file
        return prefix if root.error_file is not None or root.traceback is None else None
    lines = logs.read_stderr_text(root.local_rank).splitlines() if is_here else root.stderr_tail
    return prefix if has_printed(lines, root.exception, root.traceback) else None


def _write_reports(report: "Report", config: AgentConfig, logs: LogRouter) -> None:
    from muster.agent.diagnosis import report_files

    if logs.run_dir is not None:
        path = os.path.join(logs.run_dir, LogNames.REPORT)
        _write_or_report(path, logs, lambda: report_files.write_report(report, path))
    report_file = config.report_file
    if report_file is not None:
        _write_or_report(report_file, logs, lambda: report_files.write_report(report, report_file))
    error_file = config.agent_error_file
    if error_file is not None:
        _write_or_report(error_file, logs, lambda: report_files.write_torch_error_file(report, error_file))
    _write_termination_log(config, report_files.build_termination_message(report), logs)


def _write_or_report(path: str, logs: LogRouter, write: Callable[[], object]) -> None:
    def write_or_report() -> None:
        try:
            write()
        except OSError as error:
            logs.print_line(f"cannot write {path}: {error.strerror}")

    try:
        if not run_limited([write_or_report], _WRITE_LIMIT_S):
            logs.print_line(f"cannot write {path}: its disk does not answer")
    except RuntimeError:  # no threads left: finish the output regardless
        write_or_report()


def _write_termination_log(config: AgentConfig, message: bytes, logs: LogRouter) -> None:
    path = config.termination_log
    if path is not None:
        _write_or_report(path, logs, lambda: _write(path, message))


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def wait_for_exit(config: AgentConfig, failed_s: float, *, prints_report: bool) -> None:
    """Wait in containers until all agents have written their reports, and in pods until the page's node has ended.

    The first pod that ends with a failure makes the Job controller remove all pods that it does not know to have ended,
    together with their logs. A kubelet checks once a second which pods have ended. So the pod whose log has the report
    ends first, by more than a second, and is never removed. The others may be.

    Args:
        config: the agent's.
        failed_s: when the agent learned of the job's failure, time.monotonic; all agents do within one network delay.
        prints_report: whether this node does.
    """
    if config.termination_log is not None:
        is_awaited = any(row.is_awaited and row.is_wanted(config.base_env, config) for row in SINKS)
        later_s = LATER_EXIT_S + (WITNESS_END_S if is_awaited else 0.0)  # awaited by the node with the page
        exit_s = COMMON_EXIT_S if prints_report or not config.is_pod else later_s
        time.sleep(max(0.0, failed_s + exit_s - time.monotonic()))


# -- the last line ---------------------------------------------------------------------------------------------------


def describe_job(
    times: RunTimes,
    config: AgentConfig,
    run_dir: str | None,
    ended: JobEnded | None,
) -> str:
    """Format the job's last line.

    Args:
        times: this agent's.
        config: this agent's.
        run_dir: the folder of the run's logs; None if there is none.
        ended: how the job ended; None if a signal has stopped this node.
    """
    if ended is None:
        end = "stopped"
    else:
        end = "stopped at a common step" if ended.is_drained else "succeeded" if ended.succeeded else "failed"
    parts = [f"{end} after {format_duration(times.duration_s)}"]
    if times.restarts:
        word = "restart" if times.restarts == 1 else "restarts"
        parts.append(
            f"{times.restarts} {word} of the workers ({format_duration(times.without_workers_s)} without them)"
        )
    else:
        parts.append("no restarts since then" if config.counts_since else "no restarts")
    peak_bytes = max(0 if ended is None else ended.peak_bytes, read_peak_bytes())
    if peak_bytes:
        parts.append(f"peak memory of a worker {format_size(peak_bytes)}")
    has_report = ended is not None and not ended.succeeded
    return "; ".join([*parts, describe_logs(config, run_dir, succeeded=not has_report)])


def describe_logs(config: AgentConfig, run_dir: str | None, *, succeeded: bool) -> str:
    """Return where the logs are: a folder of this machine, or the command that shows them from outside a container."""
    if config.log_command:
        return f"logs: {config.log_command}"
    nothing = StdChoice()
    writes_files = (config.logs.redirects, config.logs.tee) != (nothing, nothing)
    if run_dir is None and config.logs.base_dir:
        return "no log files"  # none requested, or reported earlier
    if run_dir is None or not (writes_files or config.logs.base_dir or not succeeded):
        return "no log files (--log-dir and --tee 3 keep them)"
    return f"logs: {run_dir}"
