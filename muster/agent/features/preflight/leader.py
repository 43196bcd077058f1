"""The half at the leader: compares what the nodes' preflight has read, and names what differs, and where. Pure.

Different code on a node is an error, because no attempt could do better. All else is a warning. Clocks are compared by
the time between a node's own wall clock and the arrival. A late message therefore makes its node seem late, and a
difference that a loaded machine explains is no finding.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from muster._shared.codec import decode
from muster._shared.preflight import CLOCK, CODE, MOST_SKEW_S, UNLIKE, VERSIONS, Check
from muster._shared.records import NO_ITEMS, record, replace
from muster._shared.reports import FinalFailure, format_duration
from muster.agent.features.preflight.messages import NodeFacts
from muster.agent.rendezvous.consensus.halves import PartDecision, PartJob, Plan
from muster.agent.round import PartMemory

_NAMED = 8
"""The most nodes that one line names."""
_LINES_KEPT = 64
VERDICT = "no attempt could do better: not retried (--preflight off starts the job anyway)"
"""What follows from an error."""


@record
class NodeReports:
    """What the nodes have reported, in any round of this leader."""

    facts: Mapping[str, tuple[NodeFacts, float]] = NO_ITEMS
    """By member: what it has read, and its wall clock minus the leader's clock at the arrival."""
    printed: tuple[str, ...] = ()
    """Lines that were printed."""


def plan(job: PartJob, before: object, remembered: PartMemory | None, offers: Mapping[str, str]) -> Plan:
    """See `consensus.halves.LeaderHalf`."""
    del job, remembered, offers
    return Plan(state=before)


def decide(job: PartJob, state: object, sender: str, content: str) -> PartDecision:
    """Compare all nodes of the round once all have reported. An error ends the job."""
    reports = state if isinstance(state, NodeReports) else NodeReports()
    found = decode(NodeFacts, json.loads(content))
    reports = replace(reports, facts={**reports.facts, sender: (found, found.clock_s - job.now_s)})
    if not all(each in reports.facts for each in job.assignments):
        return PartDecision(state=reports)
    ordered = sorted(job.assignments.values(), key=lambda each: each.group_rank)
    nodes = [CheckedNode(job.describe(each.id), *reports.facts[each.id]) for each in ordered]
    differences = compare_nodes(nodes)
    lines = (each.describe() for each in differences if not each.is_error)
    new = tuple(line for line in lines if line not in reports.printed)
    error = next((each for each in differences if each.is_error), None)
    return PartDecision(
        state=replace(reports, printed=(*reports.printed, *new)[-_LINES_KEPT:]),
        lines=new,
        final=None if error is None else FinalFailure(cause=error.describe(), verdict=VERDICT),
    )


class CheckedNode(NamedTuple):
    """What one node has read."""

    name: str
    """The node's name for lines: "node 1 (host-b)"."""
    facts: NodeFacts
    offset_s: float
    """The node's wall clock minus the leader's clock at the arrival. It is useful only against another node's."""


@record
class Difference:
    """One thing in which nodes differ."""

    row: Check
    text: str
    is_error: bool = False

    def describe(self) -> str:
        """Return one line."""
        return f"preflight: {self.text}: {self.row.advice}"


def compare_nodes(nodes: Sequence[CheckedNode]) -> tuple[Difference, ...]:
    """Compare all nodes of a round, in the order of their group ranks."""
    return tuple(_compare(nodes))


def _compare(nodes: Sequence[CheckedNode]) -> Iterator[Difference]:
    if text := _find_odd(nodes, [node.facts.workspace for node in nodes], "the workspace of"):
        yield Difference(row=CODE, text=text, is_error=True)
    if text := _find_odd(nodes, [node.facts.script for node in nodes], "the script of"):
        yield Difference(row=CODE, text=text)
    for name in dict.fromkeys(name for node in nodes for name, _ in node.facts.versions):
        versions = [dict(node.facts.versions).get(name, "") for node in nodes]
        if text := _find_odd(nodes, versions, f"{name} of", shows_values=True):
            yield Difference(row=VERSIONS, text=text)
    yield from _compare_devices(nodes)
    yield from _compare_clocks(nodes)


def _find_odd(nodes: Sequence[CheckedNode], values: Sequence[str], what: str, *, shows_values: bool = False) -> str:
    """Name the nodes that differ from most; "" if all that know the value are alike."""
    counts = Counter(filter(None, values))
    if len(counts) <= 1:
        return ""
    usual = counts.most_common(1)[0][0]
    odd = [node for node, value in zip(nodes, values, strict=True) if value and value != usual]
    like = nodes[list(values).index(usual)]
    shown = f" is {', '.join(sorted({*counts} - {usual}))}" if shows_values else " differs"
    expected = f"expected {usual} as of" if shows_values else "expected that of"
    return f"{what} {_name(odd)}{shown}, {expected} {like.name}"


def _name(nodes: Sequence[CheckedNode]) -> str:
    rest = f" and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else ""
    return f"{', '.join(node.name for node in nodes[:_NAMED])}{rest}"


def _compare_devices(nodes: Sequence[CheckedNode]) -> Iterator[Difference]:
    """Return a node with fewer GPUs than most others that have as many workers."""
    for nproc in dict.fromkeys(node.facts.nproc for node in nodes):
        same = [node for node in nodes if node.facts.nproc == nproc]
        usual = Counter(node.facts.devices for node in same if node.facts.devices).most_common(1)
        most = (usual[0][0] if usual else 0) or 0
        odd = [node for node in same if (node.facts.devices or 0) < most]
        if odd:
            has = ", ".join(dict.fromkeys(str(node.facts.devices or 0) for node in odd))
            verb = "has" if len(odd) == 1 else "have"
            yield Difference(row=UNLIKE, text=f"{_name(odd)} {verb} {has} devices, expected {most} as the others")


def _compare_clocks(nodes: Sequence[CheckedNode]) -> Iterator[Difference]:
    """Compare clocks with the median, because the leader's own may be wrong; of two nodes, with the first."""
    is_pair = len(nodes) == 2  # no majority
    median_s = nodes[0].offset_s if is_pair else sorted(node.offset_s for node in nodes)[len(nodes) // 2]
    odd = [node for node in nodes if abs(node.offset_s - median_s) > MOST_SKEW_S]
    for node in odd[:_NAMED]:
        skew_s = node.offset_s - median_s
        direction = "ahead of" if skew_s > 0 else "behind"
        others = f"that of {nodes[0].name}" if is_pair else "those of most nodes"
        text = f"the clock of {node.name} is {format_duration(abs(skew_s))} {direction} {others}"
        yield Difference(row=CLOCK, text=f"{text}, expected at most {MOST_SKEW_S:g} s")
