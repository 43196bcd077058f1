"""The last line of a job: how long it took, what restarts cost, how much memory it needed, where its logs are.

Imported at the job's end, by the one node that prints it.
"""

from muster._processes import read_peak_bytes
from muster.agent.config import AgentConfig, StdChoice
from muster.agent.diagnosis.report import format_size
from muster.agent.rendezvous.interface import JobEnded
from muster.agent.runtime.event_log import RunTimes


def describe_job(
    times: RunTimes,
    config: AgentConfig,
    run_dir: str | None,
    ended: JobEnded | None,
) -> str:
    """Format the line.

    Args:
        times: of this agent.
        config: of this agent.
        run_dir: the folder of the run's logs; None: there is none.
        ended: how the job ended; None: a Ctrl-C has stopped this node.
    """
    if ended is None:
        end = "stopped"
    else:
        end = "stopped at a common step" if ended.is_drained else "succeeded" if ended.succeeded else "failed"
    parts = [f"{end} after {format_duration(times.duration_s)}"]
    if times.restarts:
        word = "restart" if times.restarts == 1 else "restarts"
        parts.append(f"{times.restarts} {word} ({format_duration(times.without_workers_s)} without workers)")
    else:
        parts.append("no restarts")
    peak_bytes = max(0 if ended is None else ended.peak_bytes, read_peak_bytes())
    if peak_bytes:
        parts.append(f"peak memory of a worker {format_size(peak_bytes)}")
    has_report = ended is not None and not ended.succeeded
    return "; ".join([*parts, describe_logs(config, run_dir, succeeded=not has_report)])


def format_duration(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3 min 5 s`, `2 h 10 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, rest_min = divmod(minutes, 60)
    return f"{hours} h {rest_min} min" if hours else f"{minutes} min {rest_s} s"


def describe_logs(config: AgentConfig, run_dir: str | None, *, succeeded: bool) -> str:
    """Where the logs are: a folder of this machine, or the command that shows them from outside a container."""
    if config.log_command:
        return f"logs: {config.log_command}"
    nothing = StdChoice()
    writes_files = (config.logs.redirects, config.logs.tee) != (nothing, nothing)
    if run_dir is None or not (writes_files or config.logs.base_dir or not succeeded):
        return "no log files (--log-dir and --tee 3 keep them)"
    return f"logs: {run_dir}"
