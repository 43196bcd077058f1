"""Names of a job's spans in traces, which stay the same after every restart. Pure.

Source: https://www.w3.org/TR/trace-context (traceparent).
"""

from muster._shared.records import record, replace


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
    fields = text.strip().split("-")
    lengths = [len(word) for word in fields[:4]]
    is_hex = not set("".join(fields[:4])) - set("0123456789abcdef")
    if lengths != [2, 32, 16, 2] or not is_hex or fields[0] == "ff" or (fields[0] == "00" and len(fields) > 4):
        return None
    if not (fields[1].strip("0") and fields[2].strip("0")):
        return None
    return TraceParent(trace_id=fields[1], span_id=fields[2], flags=fields[3])


def derive_span_id(trace_id: str, what: str, number: int) -> str:
    """Return the id of a span that every node of the job can derive, such as the attempt of a round."""
    return _hash(f"{trace_id} {what} {number}")[:16]


def build_trace_env(job_parent: str, round_number: int) -> dict[str, str]:
    """Return the variable that makes the workers' spans part of their attempt's; `job_parent` names the job's."""
    job = parse_trace_parent(job_parent)
    if job is None:
        return {}
    attempt = replace(job, span_id=derive_span_id(job.trace_id, "attempt", round_number))
    return {"TRACEPARENT": attempt.format()}


def derive_trace_id(run_id: str) -> str:
    """Return the trace id of a job whose trace is not part of another one."""
    return _hash(f"muster trace {run_id}")[:32]


def _hash(text: str) -> str:
    import random  # nothing here is secret, and `hashlib` would load 4 MB of OpenSSL

    return f"{random.Random(text).getrandbits(128):032x}"  # noqa: S311  # as above
