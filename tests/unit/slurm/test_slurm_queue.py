"""What a real squeue has printed is read."""

from muster.schedulers.slurm import client

SQUEUE = """\
19500067|COMPLETED|None|n[1-2]|2026-11-25T20:10:47|2026-11-25T20:10:50|2026-11-25T20:10:48
19500068|FAILED|NonZeroExitCode|n[1-2]|2026-11-25T20:10:48|2026-11-25T20:10:51|2026-11-25T20:10:48
19500071|RUNNING|None|n[1-2]|2026-11-25T20:10:55|2027-11-25T20:11:01|2026-11-25T20:11:01
19500073|PENDING|BeginTime||2026-11-25T20:10:54|NONE|2026-11-26T06:10:54
"""
"""What a real one printed on 25 November 2026."""


def test_what_squeue_has_printed_is_read():
    found = client._parse_rows(SQUEUE)
    assert [(each.state, each.reason, each.nodes) for each in found] == [
        ("COMPLETED", "", ("n1", "n2")),
        ("FAILED", "NonZeroExitCode", ("n1", "n2")),
        ("RUNNING", "", ("n1", "n2")),
        ("PENDING", "BeginTime", ()),
    ]
    assert [None if each.end_s is None else each.end_s - each.start_s for each in found] == [2, 3, 365 * 86400, None]
