"""Histories of an agent's records, and of what is seen of steps between them, in any order."""

from hypothesis import strategies as st

_RECORDS = (
    *(
        ("round_formed", {"nodes": 2}),
        ("workers_started", {}),
        ("workers_stopped", {}),
        ("fenced", {}),
        ("agent_started", {}),
    ),
    *(
        ("round_broken", {"kind": kind, "hang": hang, "reason": kind})
        for kind in ("failure", "membership", "drained", "final")
        for hang in (True, False)
    ),
    *((what, {}) for what in ("hang_named", "hang_ended", "stood_still", "moved_again", "nodes_awaited")),
    *(("drain_begun", {"kind": kind}) for kind in ("stop", "checkpoint", "pause")),
    *(("drain_committed", {"step": 5}), ("drain_withdrawn", {}), ("checkpoint_completed", {"step": 5})),
)


RECORDS = st.lists(
    st.tuples(
        st.floats(0.0, 1000.0),
        st.sampled_from(_RECORDS)
        | st.tuples(st.integers(0, 20), st.floats(0.0, 5.0), st.booleans(), st.sampled_from(("", "save", "eval"))),
    ),
    max_size=60,
)
"""After how many seconds: a record and its detail; or steps: how many were done, how long ago, whether a script counts
them, and the phase.
"""
