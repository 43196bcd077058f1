"""A round, a record and a failed worker, of which a test names only what matters to it."""

import json
from collections.abc import Mapping
from typing import Any

from muster._shared.contract import FORMAT
from muster._shared.reports import Failure
from muster.agent.round import Round
from muster.agent.runtime.event_log import EventRecord


def make_round(nproc: int = 2, **changes: Any) -> Round:
    """The first round of a job of one node; its only role has all ranks."""
    values = {"number": 1, "attempt": 0, "restarts_left": 0, "group_rank": 0, "group_world_size": 1, "rank_offset": 0}
    values |= {"world_size": nproc, "master_addr": "a", "master_port": 1, **changes}
    return Round(role_rank_offset=values["rank_offset"], role_world_size=values["world_size"], **values)


def make_record(
    what: str, at_s: float = 0.0, *, detail: Mapping[str, Any] | None = None, **changes: Any
) -> EventRecord:
    """An agent's record of the first node, in the first round."""
    values = {"time_s": 1000.0 + at_s, "monotonic_s": at_s, "node": 0, "node_index": 0, "round": 1, "attempt": 0}
    return EventRecord(what=what, detail=detail or {}, **{**values, **changes})


FAILURE: Mapping[str, Any] = {
    "node": 0,
    "node_index": 0,
    "host": "h",
    "local_rank": 0,
    "global_rank": 0,
    "attempt": 0,
    "round": 1,
    "pid": 1,
    "time_s": 0.0,
}
"""Of the only worker of the first node, in the first round: what no failure lacks."""


def make_failure(**changes: Any) -> Failure:
    """See `FAILURE`."""
    return Failure(**{**FAILURE, **changes})


def make_failure_of_rank_3(**changes: Any) -> Failure:
    """Of a worker of the second node."""
    place = {"node": 1, "node_index": 1, "host": "host-b", "local_rank": 1, "global_rank": 3, "pid": 4711}
    seen = {"time_s": 1_700_000_000.25, "log_path": "/logs/job/attempt_0/1/stderr.log"}
    return make_failure(**{**place, **seen, **changes})


def write_report(reason: str, *failures: Mapping[str, Any], run_id: str = "x") -> str:
    """An agent's last message; each failure is what differs from `FAILURE`."""
    told = {"format": FORMAT, "run_id": run_id, "reason": reason}
    return json.dumps({**told, "failures": [{**FAILURE, **each} for each in failures]})
