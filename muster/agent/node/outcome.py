"""Reports how the job ended: on the console, in report.json, torch's error file and the termination log."""

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from muster._contract import ExitCode, LogNames
from muster.agent.config import AgentConfig
from muster.agent.logs import LogRouter
from muster.agent.node.actions import Finish
from muster.agent.runtime.event_log import RunTimes
from muster.agent.runtime.loop import run_limited

if TYPE_CHECKING:
    from muster.agent.diagnosis.report import Report

_WRITE_LIMIT_S = 2.0
"""How long each report may take: the agent's end must not wait for a disk that hangs."""

COMMON_EXIT_S = 0.5
"""An agent on Kubernetes exits this long after it has learned of the job's failure: every report is written by then."""


def report_outcome(
    finish: Finish, config: AgentConfig, logs: LogRouter, times: RunTimes, *, is_first_node: bool
) -> int:
    """Print and write the reports, and the job's last line; the agent's exit code.

    Nothing here may keep the agent from ending: a file that cannot be written is named in one line.
    """
    if finish.rendezvous_failed is not None and finish.code in (ExitCode.RENDEZVOUS, ExitCode.USAGE):
        logs.print_line(finish.rendezvous_failed.reason)
        _write_termination_log(config, finish.rendezvous_failed.reason.encode(), logs)
    if finish.ended is not None and finish.ended.report is not None:
        _publish_report(finish.ended.report, finish.ended.prints_report, config, logs)
    ended = finish.ended
    is_silent = config.control_fd is not None and int(finish.code) == 0  # the program that drives this agent is told
    if ended is not None and not is_silent and (ended.prints_report if ended.report is not None else is_first_node):
        from muster.agent.node.summary import describe_job  # only one node of the job prints it

        logs.print_line(describe_job(times, config, logs.run_dir, succeeded=ended.succeeded))
    return int(finish.code)


def _publish_report(report: "Report", prints: bool, config: AgentConfig, logs: LogRouter) -> None:
    from muster.agent.diagnosis import report_files, report_text  # only a failed job needs it

    if prints:
        logs.print_text(report_text.format_report(report, has_colour=logs.has_colour))
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

    if not run_limited(write_or_report, _WRITE_LIMIT_S):
        logs.print_line(f"cannot write {path}: its disk does not answer")


def _write_termination_log(config: AgentConfig, message: bytes, logs: LogRouter) -> None:
    path = config.termination_log
    if path is not None:
        _write_or_report(path, logs, lambda: _write(path, message))


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def wait_for_common_exit(config: AgentConfig, failed_s: float) -> None:
    """On Kubernetes, wait so that all agents exit at the same moment.

    The first pod that ends with a failure makes the Job controller remove all pods that it does not know to have ended,
    and with them their logs. A kubelet checks once a second which pods have ended: the closer together the ends are,
    the rarer one is seen without the others.

    Args:
        config: the agent's.
        failed_s: when the agent learned of the job's failure, time.monotonic; all agents do within one network delay.
    """
    if config.termination_log is not None:
        time.sleep(max(0.0, failed_s + COMMON_EXIT_S - time.monotonic()))
