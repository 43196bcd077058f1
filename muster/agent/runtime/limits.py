"""The limits of supervision, which the tests' launcher multiplies by one number: their ratios never change.

Not here: what flags say, what processes, disks and networks need, and intervals of tenths of a second.
"""

import os

TIME_SCALE = float(os.environ.get("MUSTER_TIME_SCALE") or 1)

KEEP_ALIVE_INTERVAL_S = 1.0 * TIME_SCALE
"""The default of `--rdzv-conf keep_alive_interval`: the time between two heartbeats."""
KEEP_ALIVE_ATTEMPTS = 5
"""The default of `--rdzv-conf keep_alive_max_attempt`: a node that sends no heartbeat for so many intervals is lost."""
LEASE_MARGIN_S = 1.0 * TIME_SCALE
"""The longest time that a lease ends before the silence limit."""
PAUSE_S = 1.0 * TIME_SCALE
"""Without activity for this long, the leader's process may have been stopped."""
STOP_MARGIN_S = 10.0 * TIME_SCALE
"""How long after its own limit a member that still stops its workers counts as lost. Its node gives up first."""

LAST_CALL_S = 3.0 * TIME_SCALE
"""The default of `--last-call-timeout`."""
JOIN_ANSWER_LIMIT_S = 5.0 * TIME_SCALE
"""How long a leader that accepted the connection may take to answer the join."""
ENDPOINT_SEARCH_S = 2.0 * TIME_SCALE
"""How long the node at the job's endpoint searches for a leader elsewhere before it leads the nodes that join it."""
ANNOUNCEMENT_WAIT_S = 2.0 * TIME_SCALE
"""How long a leader with empty state forms only full rounds, because an acting leader may announce itself."""
ANNOUNCEMENT_INTERVAL_S = 0.5 * TIME_SCALE
ANNOUNCEMENT_REPLY_S = 2.0 * TIME_SCALE
ANNOUNCEMENT_DIAL_S = 1.4 * TIME_SCALE
"""Three round trips of 0.4 s. With the interval it is shorter than `ANNOUNCEMENT_WAIT_S`, because node 0 may start
right after a dial got no answer."""

JOIN_STOP_LIMIT_S = 600.0 * TIME_SCALE
"""How long ranks may take to stop at one step and save when nodes join. Then they are stopped at once."""

STORM_S = 60.0 * TIME_SCALE
"""More than `failures.STORM_ROUNDS` rounds within this time without a step are a storm."""
STORM_WAIT_S = 5.0 * TIME_SCALE
"""How long the first wait is. Each later one is twice as long, up to `STORM_S`."""

STILL_PAGE_S = 10.0 * TIME_SCALE
"""How long workers must have stood still for a stop to print their stacks."""
STILL_S = 50.0 * TIME_SCALE
"""After this time it is first reported that workers stand still, and then at intervals that double."""
WAITED_S = 5.0 * TIME_SCALE
"""A rank that has waited for less is not reported to wait for another."""
HANG_LOOK_S = 5.0 * TIME_SCALE
"""The longest time between two looks for a hang."""
COLLECTIVE_WAIT_S = 60.0 * TIME_SCALE
"""A worker that waits for less is not reported to hang, however short the timeout of its process group is."""
TORCH_MARGIN_S = 30.0 * TIME_SCALE
"""How long before the timeout of its process group a rank that waits in a collective counts as hung."""
HANG_LEAST_S = 60.0 * TIME_SCALE
"""The least limit that `--hang-timeout auto` learns."""
HANG_UNKNOWN_S = 480.0 * TIME_SCALE
"""The limit of an unknown phase, and the least limit of a pause that is not quiet."""
HANG_NAMED_BUSY_S = 1800.0 * TIME_SCALE
"""The least limit of a pause that is not quiet in a named phase, because the program says that it works."""
