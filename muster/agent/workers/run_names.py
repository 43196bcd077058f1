"""Names of a run for trackers and traces, which stay the same after every restart. Pure.

A job is one run in a tracker: the `init` of Weights & Biases, Comet and MLflow reads from variables which run it
continues. The variables are set only for global rank 0, and not for a tracker of which the user has set a variable. If
one script began several runs in one attempt, they would become one run. So all of this is optional (`--tracker-run`).

MLflow's server gives a run its id, which cannot be known before. There each attempt's run gets tags with the ids, by
which the script finds the run to continue.

Source: wandb 0.31 (sdk/wandb_settings.py, `validate_run_id`), comet_ml 3.58 (`is_valid_experiment_key`), mlflow 3.17
(tracking/context/system_environment_context.py); https://www.w3.org/TR/trace-context (traceparent).
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Final

from muster._shared.records import record, replace

_WANDB: Final = ("WANDB_RUN_ID", "WANDB_RESUME")
_COMET: Final = ("COMET_EXPERIMENT_KEY", "COMET_START_MODE")
_MLFLOW: Final = ("MLFLOW_RUN_ID", "MLFLOW_RUN_CONTEXT")
_RESERVED: Final = frozenset(":;,#?/'\\ \t\n")
_WANDB_CHARS: Final = 128


def build_tracker_env(run_id: str, attempt: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that let trackers continue one run; `env` is the worker's, with the user's variables."""
    tags = {"muster.job_id": run_id, "muster.attempt_id": f"{run_id}-{attempt}"}
    trackers = (
        (_WANDB, {"WANDB_RUN_ID": _name_wandb_run(run_id), "WANDB_RESUME": "allow"}),
        (_COMET, {"COMET_EXPERIMENT_KEY": _hash(run_id)}),
        (_MLFLOW, {"MLFLOW_RUN_CONTEXT": json.dumps(tags)}),
    )
    return {
        name: value
        for own, values in trackers
        if not any(name in env for name in own)
        for name, value in values.items()
    }


def _name_wandb_run(run_id: str) -> str:
    is_allowed = len(run_id) <= _WANDB_CHARS and not _RESERVED & set(run_id)
    return run_id if is_allowed else _hash(run_id)


def _hash(text: str) -> str:
    """Return 32 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# -- traces -----------------------------------------------------------------------------------------------------------


@record
class TraceParent:
    """A span of a trace, as the variable TRACEPARENT names it."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    flags: str = "01"
    """2 hexadecimal digits; the lowest bit means that spans are recorded."""

    @property
    def is_sampled(self) -> bool:
        """Whether spans are recorded."""
        return int(self.flags, 16) & 1 == 1

    def format(self) -> str:
        """Format the span as the variable has it."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"


def parse_trace_parent(text: str) -> TraceParent | None:
    """Parse the variable TRACEPARENT. Return None for anything else: the job then begins its own trace.

    >>> parse_trace_parent("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01").span_id
    '00f067aa0ba902b7'
    """
    words = text.strip().split("-")
    lengths = [len(word) for word in words[:4]]
    is_hex = not set("".join(words[:4])) - set("0123456789abcdef")
    if lengths != [2, 32, 16, 2] or not is_hex or words[0] == "ff" or (words[0] == "00" and len(words) > 4):
        return None
    if not (words[1].strip("0") and words[2].strip("0")):
        return None
    return TraceParent(trace_id=words[1], span_id=words[2], flags=words[3])


def derive_span_id(trace_id: str, what: str, number: int) -> str:
    """Return the id of a span that every node of the job can derive, such as the attempt of a round."""
    return hashlib.sha256(f"{trace_id} {what} {number}".encode()).hexdigest()[:16]


def build_trace_env(job_parent: str, round_number: int) -> dict[str, str]:
    """Return the variable that makes the workers' spans part of their attempt's; `job_parent` names the job's."""
    job = parse_trace_parent(job_parent)
    if job is None:
        return {}
    attempt = replace(job, span_id=derive_span_id(job.trace_id, "attempt", round_number))
    return {"TRACEPARENT": attempt.format()}


def derive_trace_id(run_id: str) -> str:
    """Return the trace id of a job whose trace is not part of another one."""
    return _hash(f"muster trace {run_id}")
