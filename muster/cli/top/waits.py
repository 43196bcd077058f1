"""Who waits for whom, as lines: the verdict of the agents, and what each rank waits in. Pure."""

from collections.abc import Iterator

from muster._shared.job_view import JobStatus, RankStatus
from muster._shared.reports import Answer, name_ranks


def describe_waits(answer: Answer, status: JobStatus | None) -> list[str]:
    """Build the page.

    Args:
        answer: of `muster stacks`: its line is the verdict.
        status: of the job. None: its agents have reported nothing.
    """
    return [answer.line, "", *_list_collectives(status)]


def _list_collectives(status: JobStatus | None) -> Iterator[str]:
    ranks = () if status is None else status.ranks
    waiting: dict[str, list[RankStatus]] = {}
    for rank in ranks:
        waiting.setdefault(rank.collective, []).append(rank)
    for collective, group in sorted(waiting.items(), key=lambda each: -len(each[1])):
        names = name_ranks(rank.global_rank for rank in group)
        if collective:
            age_s = max((rank.collective_s or 0.0 for rank in group), default=0.0)
            yield f"{names}: in {collective}, since {age_s:.0f} s"
        elif len(waiting) > 1:
            yield f"{names}: in none of these"
    if not any(waiting):
        yield "no rank waits in a collective that is known"
    yield from ("", *(f"rank {rank.global_rank}: {text}" for rank in ranks if (text := _describe(rank))))


def _describe(rank: RankStatus) -> str:
    step = rank.optimizer_steps if rank.step is None else rank.step
    parts = (
        "" if step is None else f"step {step}",
        f"{rank.lag_steps} behind the first" if rank.lag_steps else "",
        f"phase {rank.phase}" if rank.phase else "",
        "" if rank.still_s is None else f"its last step was {rank.still_s:.0f} s ago",
        "" if rank.cpu is None else f"CPU {rank.cpu:.0%}".replace("%", " %"),
        f"last line: {rank.last_line}" if rank.last_line else "",
    )
    return ", ".join(filter(None, parts))
