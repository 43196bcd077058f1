"""The view that a person looks at: one loop reads keys, decides (`state`) and draws (`rendering`).

Reading and asking happen in threads (`source`), so that the view answers at once whatever a scheduler does.
"""

import os
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from muster._shared.control import ControlError, describe_answer
from muster._shared.job_view import JobState, JobStatus, RankStatus
from muster._shared.layouts import StatusPageLayout as Layout
from muster._shared.reports import Answer, name_ranks
from muster.cli.answers import format_stacks
from muster.cli.top.agent_requests import Jobs, Origin, Reader
from muster.cli.top.picture import KEPT_LINES, JobList, JobPicture
from muster.cli.top.rendering import (
    Size,
    describe_rank,
    draw_job,
    draw_jobs,
    draw_text,
    fold_line,
    get_status,
    list_rows,
)
from muster.cli.top.screen import Screen
from muster.cli.top.state import KeyAction, ScreenKind, Search, View, fit, found, press

FRAME_S: Final = 0.25
_LOOKS: Final = {
    KeyAction.STACKS: "asks all ranks for their stacks",
    KeyAction.WAITS: "asks all ranks whom they wait for",
}
"""They change nothing: they need not wait for a pause that a rank does not reach."""


class TopView:
    """Everything that is shown. It is single-threaded."""

    def __init__(self, jobs: Jobs, reader: Reader, handle: str | None) -> None:
        """Show nothing yet.

        Args:
            jobs: what is asked.
            reader: runs the calls.
            handle: of the job. None: the list of all.
        """
        self._jobs = jobs
        self._reader = reader
        self._handle = handle or ""
        self._view = View(screen=ScreenKind.JOBS if handle is None else ScreenKind.JOB, has_list=handle is None)
        self._list: JobList | None = None
        self.picture: JobPicture | None = None
        """The job as it was seen last. None: not yet, or the list is shown."""
        self._columns: set[str] = set()
        """See `draw_job`."""
        self._rows: list[tuple[str, int | str]] = []
        """What each row of the list is, by which the selected one is found again."""
        self._title = ""
        self._lines: list[str] = []
        self._folds = Folds()
        self._before = self._view
        """The view to which Escape leads from a text."""
        self._pending: dict[KeyAction, str] = {}
        """What was asked for and has no answer yet, in words."""
        self.failure: ControlError | None = None
        """Why nothing can be shown. The command ends with it."""

    @property
    def _name(self) -> str:
        return self._handle if self.picture is None else self.picture.handle

    def start(self) -> None:
        """Begin to look."""
        if self._view.screen is ScreenKind.JOBS:
            self._reader.repeat(self._jobs.list_jobs)
        else:
            self._reader.repeat(lambda: self._jobs.read_job(self._handle))

    def take(self) -> None:
        """Take in what threads have read."""
        for origin, content in self._reader.get():
            if isinstance(content, JobList):
                self._list = content
            elif isinstance(content, JobPicture):
                # The agents of a job that has ended may not answer any more.
                is_silent = content.has_ended and not content.statuses
                last = self.picture.statuses if self.picture is not None and is_silent else content.statuses
                self.picture = replace(content, statuses=last)
            elif isinstance(content, Answer):
                self._show_answer(origin, content)
            else:
                self._show_error(origin, content)
        lines = self._reader.get_lines()
        if lines:
            self._lines += lines
            over = len(self._lines) - KEPT_LINES
            if over > 0:
                del self._lines[:over]
                self._view = replace(self._view, top=max(0, self._view.top - self._folds.drop(over)))

    def press(self, key: str) -> bool:
        """Do what a key means. False: the view ends."""
        self._view, result = press(self._view, key)
        if isinstance(result, Search):
            self._view = found(self._view, self._search(result))
        elif result is KeyAction.QUIT:
            return False
        elif result is KeyAction.BACK:
            self._go_back()
        elif result is KeyAction.OPEN_JOB and self._list is not None:
            self._handle = self._list.rows[self._view.selected].handle
            self.picture, self._columns, self._rows = None, set(), []
            self._view = View(screen=ScreenKind.JOB, has_list=True)
            self.start()
        elif result is KeyAction.OPEN_LOG:
            self._open_log()
        elif result is not None:
            self._ask(result)
        return True

    def draw(self, size: Size) -> list[str]:
        """Return the rows of the screen."""
        if self._view.screen is ScreenKind.TEXT:
            rows = self._folds.update(self._lines, size.width)
            self._view = fit(
                self._view,
                lines=len(rows),
                page=size.height - 2 - (self._view.is_typing or bool(self._view.note)),
            )
            return draw_text(self._title, rows, self._view, size)
        if self._view.screen is ScreenKind.JOBS:
            self._keep_selection([("job", row.handle) for row in self._list.rows] if self._list else [], size)
            if self._list is None:
                return ["asks all schedulers for their jobs ..."]
            return draw_jobs(self._list, self._view, size)
        if self.picture is None:
            return [f"looks at {self._handle} ..."]
        self._view = replace(self._view, roles=max(1, len(self.picture.statuses)))
        self._keep_selection(list_rows(self.picture, self._view, size), size)
        return draw_job(self.picture, self._view, self._columns, size)

    def _keep_selection(self, rows: Sequence[tuple[str, int | str]], size: Size) -> None:
        """Select what was selected, wherever it is now.

        On the first row, select that row, because what differs comes first.
        """
        before = self._rows[self._view.selected] if self._view.selected < len(self._rows) else None
        if before in rows and self._view.selected > 0:
            self._view = replace(self._view, selected=rows.index(before))
        self._rows = list(rows)
        self._view = fit(self._view, rows=len(rows), page=max(1, size.height // 2))

    def _open_log(self) -> None:
        place = self._find_rank()
        if self.picture is None or place is None:
            self._view = replace(self._view, note="no rank is known yet")
            return
        node_index, rank = place
        role = self.picture.statuses[self._view.role % len(self.picture.statuses)][0]
        handle = self._handle
        self._reader.follow(lambda: self._jobs.follow_log(handle, role, node_index, rank))
        self._open_text(f"rank {rank} of {self._name}", [], is_following=True)

    def _find_rank(self) -> tuple[int, int] | None:
        """Return the index of the node and the global rank of the selected row."""
        status = None if self.picture is None else get_status(self.picture, self._view)
        if status is None or self._view.selected >= len(self._rows):
            return None
        kind, number = self._rows[self._view.selected]
        if kind == "rank":
            nodes = {node.node: node.node_index for node in status.nodes}
            group_rank = next((rank.node for rank in status.ranks if rank.global_rank == number), 0)
            return nodes.get(group_rank, group_rank), int(number)
        node = next((each for each in status.nodes if each.node_index == number), None)
        rank = None if node is None else node.first_rank if node.slowest is None else node.slowest.global_rank
        return None if node is None or rank is None else (node.node_index, rank)

    def _open_text(self, title: str, lines: list[str], *, is_following: bool) -> None:
        self._title, self._lines, self._folds = title, lines, Folds()
        self._before = replace(self._view, note="")
        self._view = View(
            screen=ScreenKind.TEXT, has_list=self._view.has_list, role=self._view.role, is_following=is_following
        )

    def _go_back(self) -> None:
        if self._view.screen is ScreenKind.TEXT:
            self._reader.leave_log()
            self._view = self._before
        elif self._view.screen is ScreenKind.JOB and self._view.has_list:
            self._view = View(screen=ScreenKind.JOBS, has_list=True)
            self.picture, self._rows = None, []
            self.start()

    def _ask(self, action: KeyAction) -> None:
        before = next((work for each, work in self._pending.items() if (each in _LOOKS) == (action in _LOOKS)), None)
        if before is not None:
            self._view = replace(self._view, note=f"{before}; wait for that")
            return
        status = None if self.picture is None else get_status(self.picture, self._view)
        is_paused = status is not None and status.state is JobState.PAUSED
        verb = Layout.VERBS.get(action.value)
        work = "go on" if action is KeyAction.PAUSE and is_paused else f"{verb} at one step"
        self._pending[action] = _LOOKS.get(action, f"asks all ranks to {work}")
        self._view = replace(self._view, note=f"{self._pending[action]} ...")
        handle = self._handle
        self._reader.run(action, lambda: self._jobs.ask(action, handle))

    def _show_answer(self, question: Origin | KeyAction, answer: Answer) -> None:
        if isinstance(question, KeyAction):
            self._pending.pop(question, None)
        if question is KeyAction.STACKS and answer.stacks and self._view.screen is ScreenKind.JOB:
            self._open_text(f"stacks of {self._name}", [answer.line, *format_stacks(answer.stacks)], is_following=False)
        elif question is KeyAction.WAITS and self._view.screen is ScreenKind.JOB and self.picture is not None:
            lines = describe_waits(answer, get_status(self.picture, self._view))
            self._open_text(f"who waits for whom in {self._name}", lines, is_following=False)
        else:
            self._view = replace(self._view, note=describe_answer(answer))

    def _show_error(self, origin: Origin | KeyAction, error: ControlError) -> None:
        if origin is Origin.LOG:
            self._lines.append(str(error))
            return
        if isinstance(origin, KeyAction):
            self._pending.pop(origin, None)
        elif self.picture is not None:
            self.picture = replace(self.picture, error=str(error))
            return
        elif self._view.screen is ScreenKind.JOB and not self._view.has_list:
            self.failure = error
        self._view = replace(self._view, note=str(error))

    def _search(self, search: Search) -> int | None:
        """Return the first row of the next line with the needle, in either case of letters.

        It goes on at the other end.
        """
        needle = self._view.needle.lower()
        count = len(self._lines)
        step = -1 if search.is_backward else 1
        first = self._folds.find_line(search.line, is_backward=search.is_backward)
        places = ((first + step * at) % count for at in range(count)) if count else iter(())
        return next((self._folds.starts[at] for at in places if needle in self._lines[at].lower()), None)


class Folds:
    """The rows that the lines of a text need on a screen of some width."""

    def __init__(self) -> None:
        self._rows: list[str] = []
        self._width = 0
        self.starts: list[int] = []
        """The first row of each line."""

    def update(self, lines: Sequence[str], width: int) -> Sequence[str]:
        """Return all rows. Only new lines are folded, unless the width is another."""
        if width != self._width:
            self._rows, self.starts, self._width = [], [], width
        for line in lines[len(self.starts) :]:
            self.starts.append(len(self._rows))
            self._rows += fold_line(line, width)
        return self._rows

    def drop(self, count: int) -> int:
        """Forget the first lines, and return how many rows they had."""
        dropped = self.starts[count] if count < len(self.starts) else len(self._rows)
        del self._rows[:dropped]
        self.starts = [start - dropped for start in self.starts[count:]]
        return dropped

    def find_line(self, row: int, *, is_backward: bool) -> int:
        """Return the line that begins at this row, or the next one in this direction."""
        return bisect_right(self.starts, row) - 1 if is_backward else bisect_left(self.starts, row)


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
    yield from ("", *(f"rank {rank.global_rank}: {text}" for rank in ranks if (text := describe_rank(rank))))


def run(jobs: Jobs, handle: str | None) -> tuple[ControlError | None, JobPicture | None]:
    """Show it until the person leaves.

    Args:
        jobs: what is asked.
        handle: of the job. None: the list of all jobs.

    Returns:
        Why nothing can be shown, and the job as it was seen last.

    Raises:
        ClosedError: the terminal is gone, or a signal ends the command.
        KeyboardInterrupt: Ctrl-C.
    """
    screen = Screen(sys.stdin.fileno(), sys.stdout.fileno())
    has_colours = not os.environ.get("NO_COLOR")
    is_unicode = "utf" in (sys.stdout.encoding or "").lower()
    with screen.opened():
        reader = Reader(screen.wake)
        view = TopView(jobs, reader, handle)
        view.start()
        while view.failure is None:
            width, height = screen.size
            screen.draw(view.draw(Size(width=width, height=height, has_colours=has_colours, is_unicode=is_unicode)))
            keys = screen.read_keys(FRAME_S)
            if not all(view.press(key) for key in keys):
                break
            view.take()
        return view.failure, view.picture
