"""Writes the report to files: torch's error file, `report.json`, and the termination message that Kubernetes keeps."""

import json
from collections.abc import Iterator

from muster._shared.codec import to_data
from muster._shared.contract import FORMAT, TERMINATION_LOG_LIMIT_BYTES
from muster._shared.records import replace
from muster._shared.reports import Failure, Report
from muster.agent.diagnosis.root_cause import describe_failure, find_root
from muster.agent.diagnosis.tracebacks import load_error_file
from muster.agent.logs import replace_file


def write_torch_error_file(report: Report, path: str) -> None:
    """Write the root cause as torch's agent does to its own TORCHELASTIC_ERROR_FILE, with `errorCode`.

    Source: torch/distributed/elastic/multiprocessing/errors/error_handler.py, dump_error_file. Write nothing if no
    failure is known.

    Raises:
        OSError: the file cannot be written.
    """
    root = find_root(report)
    if root is not None and root.collateral:
        root = replace(root, reason=report.reason)  # no rank is the cause
    if root is not None:
        own = root.global_rank if root.hung else None
        stack = next((stack.text for stack in report.stacks if stack.global_rank == own), "")
        replace_file(path, json.dumps(build_torch_error(root, stack)).encode())


def build_torch_error(root: Failure, stack: str = "") -> dict[str, object]:
    """Build torch's error format for one failure. Keep what the worker itself recorded if it can be read here.

    Args:
        root: the failure.
        stack: the stack of a worker that hung.
    """
    data = load_error_file(root.error_file) or {}
    message = data.get("message")
    if not isinstance(message, dict):
        tail = "\n".join(root.stderr_tail)
        extra = {
            "py_callstack": root.traceback or stack or tail or describe_failure(root),
            "timestamp": str(int(root.time_s)),
        }
        message = {"message": root.exception or describe_failure(root), "extraInfo": extra}
    return {**data, "message": {**message, "errorCode": _get_torch_code(root)}}


def _get_torch_code(failure: Failure) -> int:
    """Return the exit code, or the negated number of a signal."""
    import signal

    if failure.signal is None:
        return failure.exit_code if failure.exit_code is not None else 1
    if failure.signal in signal.Signals.__members__:
        return -int(signal.Signals[failure.signal])
    return -int(failure.signal.rpartition(" ")[2])


def write_report(report: Report, path: str) -> None:
    """Write the whole report as JSON, completely or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    replace_file(path, json.dumps(to_data(report), indent=1).encode())


def build_termination_message(report: Report) -> bytes:
    """Encode the report as JSON of at most `TERMINATION_LOG_LIMIT_BYTES`: the root cause first, then what fits."""
    root = find_root(report)
    for smaller in _shrink(replace(report, failures=_order_root_first(report, root), stacks=())):
        message = json.dumps(_remove_empty(to_data(smaller)), ensure_ascii=False).encode("utf-8", "backslashreplace")
        if len(message) <= TERMINATION_LOG_LIMIT_BYTES:
            return message
    return json.dumps({"run_id": report.run_id[:200], "reason": report.reason[:200], "format": FORMAT}).encode()


def _order_root_first(report: Report, root: Failure | None) -> tuple[Failure, ...]:
    return (root, *(failure for failure in report.failures if failure is not root)) if root else ()


def _shrink(report: Report) -> Iterator[Report]:
    """Yield smaller and smaller reports.

    Drop first other failures' details, then those failures, then the root's text.
    """
    yield report
    bare = tuple(replace(failure, traceback=None, stderr_tail=(), log_path=None) for failure in report.failures)
    yield replace(report, failures=(*report.failures[:1], *bare[1:]))
    for count in (16, 4, 1):
        yield replace(report, failures=(*report.failures[:1], *bare[1:count]))
    for chars in (2000, 1000, 400, 100, 30):
        cut = tuple(_cut_texts(failure, chars) for failure in report.failures[:1])
        yield replace(report, run_id=report.run_id[:100], reason=report.reason[:chars], failures=cut)


def _cut_texts(failure: Failure, chars: int) -> Failure:
    roomy = chars >= 400
    return replace(
        failure,
        host=failure.host[:100],
        exception=(failure.exception or "")[:chars] or None,
        traceback=(failure.traceback or "")[-chars:] if roomy else None,
        stderr_tail=tuple(line[:80] for line in failure.stderr_tail[-3:]) if roomy else (),
        reason=failure.reason[:chars],
        log_path=failure.log_path if roomy else None,
        error_file=failure.error_file if roomy else None,
    )


def _remove_empty(data: object) -> object:
    """Remove None, False and empty lists from JSON data."""
    if isinstance(data, dict):
        return {key: _remove_empty(value) for key, value in data.items() if not _is_empty(value)}
    return [_remove_empty(value) for value in data] if isinstance(data, list) else data


def _is_empty(value: object) -> bool:
    return value is None or value is False or value == []  # 0 is a rank
