"""`muster top` without a terminal: keys, what each does, rows of any size, and a line per change."""

import itertools
import re
from collections.abc import Callable

import pytest
from doubles import job_samples
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from muster._shared.contract import AskOutcome
from muster._shared.control import CommandExit, ControlError
from muster._shared.job_view import DeviceStatus, Goodput, JobEvent, JobState, JobStatus, NodeState, NodeStatus
from muster._shared.records import replace
from muster._shared.reports import Answer
from muster.cli.top.agent_requests import Origin, Reader
from muster.cli.top.app import Folds, TopView, describe_waits
from muster.cli.top.command import Changes, follow
from muster.cli.top.keys import KeyParser
from muster.cli.top.picture import JobList, JobPicture, JobRow, sort_nodes, sort_ranks
from muster.cli.top.rendering import Size, draw_job, draw_jobs, draw_text, list_rows, print_once
from muster.cli.top.state import KeyAction, ScreenKind, Search, View, fit, found, press

_KEYS = {
    b"\x1b[A": "up", b"\x1bOB": "down", b"\x1b[5~": "page up", b"\x1b[6~": "page down", b"\x1b[H": "home",
    b"\x1b[4~": "end", b"\r": "enter", b"\x7f": "backspace", b"q": "q", b"\t": "\t", "é".encode(): "é",
}  # fmt: skip


def make_picture(status: JobStatus | None = None, **changes: object) -> JobPicture:
    statuses = () if status is None else (("train", status),)
    fields = {"handle": "local_cwd://train-x7k2", "state": "RUNNING", "line": "attempt 1", "statuses": statuses}
    return JobPicture(**{**fields, **changes})


def strip(row: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", row)


class TestKeys:
    @given(st.lists(st.sampled_from(sorted(_KEYS))), st.lists(st.integers(0, 60)))
    def test_they_are_the_same_wherever_the_bytes_are_cut(self, pressed: list[bytes], cuts: list[int]) -> None:
        data = b"".join(pressed)
        places = sorted({0, len(data), *(each for each in cuts if each <= len(data))})
        parser = KeyParser()
        keys = [key for a, b in itertools.pairwise(places) for key in parser.parse(data[a:b])]
        assert keys == [_KEYS[each] for each in pressed]

    def test_escape_is_a_key_once_nothing_follows(self) -> None:
        parser = KeyParser()
        assert parser.parse(b"\x1b") == []
        assert parser.is_waiting
        assert parser.flush() == ["escape"]

    def test_escape_before_another_key(self) -> None:
        assert KeyParser().parse(b"\x1bq") == ["escape", "q"]

    @given(st.binary(max_size=200))
    def test_any_bytes_are_taken(self, data: bytes) -> None:
        parser = KeyParser()
        parser.parse(data)
        parser.flush()
        assert parser.parse(b"q")[-1:] == ["q"]


class TestPress:
    @pytest.mark.parametrize(
        ("key", "result"),
        [("s", KeyAction.STACKS), ("h", KeyAction.WAITS), ("c", KeyAction.CHECKPOINT), ("p", KeyAction.PAUSE),
         ("enter", KeyAction.OPEN_LOG), ("q", KeyAction.QUIT), ("escape", KeyAction.BACK), ("x", None), ("\t", None)],
    )  # fmt: skip
    def test_a_key_of_a_job(self, key: str, result: KeyAction | None) -> None:
        assert press(View(rows=3), key)[1] is result

    @pytest.mark.parametrize(
        ("key", "row"), [("up", 3), ("down", 5), ("home", 0), ("end", 9), ("k", 3), ("page up", 0)]
    )
    def test_the_selection_moves(self, key: str, row: int) -> None:
        assert press(View(rows=10, selected=4), key)[0].selected == row

    def test_the_selection_stays_inside(self) -> None:
        assert press(View(rows=2, selected=1), "down")[0].selected == 1
        assert fit(View(rows=9, selected=8), rows=2).selected == 1

    def test_a_stop_is_asked_again(self) -> None:
        view, result = press(View(), "S")
        assert (view.asks_stop, result) == (True, None)
        assert press(view, "y")[1] is KeyAction.STOP
        refused, result = press(view, "q")
        assert (refused.asks_stop, result, refused.note) == (False, None, "not stopped")

    def test_the_next_role(self) -> None:
        assert press(View(roles=2, role=1), "\t")[0].role == 0

    def test_a_text_is_scrolled_and_follows(self) -> None:
        view = fit(View(screen=ScreenKind.TEXT), lines=100, page=10)
        assert view.top == 90
        view = press(view, "page up")[0]
        assert (view.top, view.is_following) == (80, False)
        assert fit(view, lines=200).top == 80
        assert fit(press(view, "end")[0], lines=200).top == 190

    def test_a_search_is_typed(self) -> None:
        view = fit(View(screen=ScreenKind.TEXT), lines=100, page=10)
        for key in ("/", "a", "q", "backspace"):
            view, result = press(view, key)
            assert result is None
        view, result = press(view, "enter")
        assert (view.needle, result) == ("a", Search(line=90))
        assert press(found(view, 5), "n")[1] == Search(line=6)
        assert press(found(view, 5), "N")[1] == Search(line=4, is_backward=True)
        assert "'a'" in found(view, None).note


SAMPLES: dict[str, Callable[[], JobStatus]] = {
    "one rank": lambda: job_samples.make_job(1, 1),
    "8 ranks": lambda: job_samples.make_job(8, 2),
    "64 ranks": lambda: job_samples.make_job(64, 64),
    "512 ranks": lambda: job_samples.make_job(512, 64),
    "waiting": lambda: job_samples.make_waiting(2),
    "starting": lambda: job_samples.make_starting(8, 2),
    "hang": lambda: job_samples.make_hang(8, 2),
    "crash": lambda: job_samples.make_crash(64, 8),
}


PLAIN = Size(width=80, height=24, has_colours=False, has_styles=False)
WIDE = replace(PLAIN, width=120)


def draw(status: JobStatus | None, view: View | None = None, size: Size = PLAIN, **changes: object) -> list[str]:
    return draw_job(make_picture(status, **changes), view or View(), set(), size)


class TestRendering:
    @pytest.mark.parametrize("sample", SAMPLES)
    @pytest.mark.parametrize(("width", "height"), [(8, 1), (40, 10), (80, 3), (80, 24), (200, 50)])
    def test_rows_fill_the_screen_and_no_more(self, sample: str, width: int, height: int) -> None:
        picture = make_picture(SAMPLES[sample](), line="日本語" * 30)
        size = Size(width=width, height=height)
        for view in (View(selected=1), View(note="n" * 300)):
            rows = draw_job(picture, view, set(), size)
            assert len(rows) == height
            assert max(cell_len(strip(row)) for row in rows) <= width

    @pytest.mark.parametrize("view", [View(), View(note="saved at step 9"), View(asks_stop=True)])
    def test_the_keys_are_always_there(self, view: View) -> None:
        last = draw(job_samples.make_job(), view)[-1]
        assert "s stacks" in last
        assert "q quit" in last

    def test_of_many_ranks_those_that_differ_come_first(self) -> None:
        status = job_samples.make_crash(64, 8)
        assert sort_ranks(status, 10)[0].global_rank == 63
        assert [rank.global_rank for rank in sort_ranks(status, 64)] == list(range(64))
        assert "  63 " in "\n".join(draw(status))

    @pytest.mark.parametrize(("rate", "first"), [(4.8, 0), (0.1, 40), (None, 0)])
    def test_a_rank_that_is_less_than_a_second_behind_stays_in_its_place(self, rate: float | None, first: int) -> None:
        """Else the order changed with each look."""
        ranks = [replace(each, rate=rate, lag_steps=each.global_rank == 40) for each in job_samples.make_job(64).ranks]
        status = replace(job_samples.make_job(64), ranks=tuple(ranks), slow_ranks=())
        assert sort_ranks(status, 10)[0].global_rank == first
        last = replace(status, state=JobState.ENDED)
        assert sort_ranks(last, 10)[0].global_rank == 0

    def test_ranks_that_are_in_no_collective_come_first_only_if_others_wait(self) -> None:
        job = replace(job_samples.make_job(64), slow_ranks=())
        ranks = tuple(
            replace(each, lag_steps=0, collective="" if each.global_rank == 40 else "all_reduce #1", collective_s=0.2)
            for each in job.ranks
        )
        assert sort_ranks(replace(job, ranks=ranks), 10)[0].global_rank == 0
        waiting = tuple(replace(each, collective_s=3.0 if each.collective else None) for each in ranks)
        assert sort_ranks(replace(job, ranks=waiting), 10)[0].global_rank == 40

    def test_a_node_with_one_rank_names_it_once(self) -> None:
        rows = draw(job_samples.make_job(2, 2))
        assert ["0", "host-0", "running", "0"] in [row.split()[:4] for row in rows]

    def test_what_is_left_out_is_counted(self) -> None:
        rows = draw(job_samples.make_job(64, 8), size=replace(PLAIN, width=200))
        assert sum("of 64 ranks: those" in row for row in rows) == 1
        assert sum("of 8 nodes: those" in row for row in rows) == 1
        rows = draw(job_samples.make_job(64, 8))
        assert sum(" of 64)" in row for row in rows) == sum(" of 8)" in row for row in rows) == 1  # it was cut off
        rows = draw(job_samples.make_job(8, 1), size=replace(PLAIN, width=200))
        assert not any("differ" in row for row in rows)

    def test_a_lost_node_comes_first(self) -> None:
        status = job_samples.make_job(64, 64)
        lost = replace(status.nodes[40], state=NodeState.LOST)
        status = replace(status, nodes=(*status.nodes[:40], lost, *status.nodes[41:]))
        assert sort_nodes(status, 5)[0].node_index == 40

    def test_without_ranks_the_nodes_can_be_selected(self) -> None:
        status = job_samples.make_job(512, 64)
        assert list_rows(make_picture(status), View(), PLAIN)[0][0] == "node"
        last = draw(status, View(selected=63, rows=64))
        assert any("host-63" in row for row in last)

    def test_what_a_rank_writes_is_no_control_sequence(self) -> None:
        status = job_samples.make_job(1, 1)
        status = replace(status, ranks=(replace(status.ranks[0], last_line="\x1b[2Jx\x07"),))
        rows = draw(status, size=WIDE)
        assert not any("\x1b" in row or "\x07" in row for row in rows)

    def test_numbers_that_lie_are_shown(self) -> None:
        status = replace(
            job_samples.make_job(2, 1), step=2**47, total=1, rate=1e12, eta_s=1e12, values=(("loss", "nan"),)
        )
        rows = draw(status, size=WIDE)
        assert any("loss nan" in row for row in rows)

    @pytest.mark.parametrize(("ranks", "nodes", "height"), [(12, 1, 24), (64, 8, 24), (512, 64, 24), (64, 8, 50)])
    def test_the_selected_row_is_that_of_the_list(self, ranks: int, nodes: int, height: int) -> None:
        status = job_samples.make_crash(ranks, nodes)
        slow = tuple(replace(each, global_rank=rank) for each in status.slow_ranks[:1] for rank in (1, 2))
        picture = make_picture(replace(status, reason="rank 7 exited", slow_ranks=slow), error="no answer")
        size = Size(width=80, height=height)
        places = list(enumerate(list_rows(picture, View(), size)))
        for at, (kind, number) in places[:: len(places) // 30 + 1]:
            rows = draw_job(picture, View(selected=at), set(), size)
            (row,) = (strip(row) for row in rows if "\x1b[7m" in row)
            shown = int(row.split()[0])
            assert shown == number, f"{kind} {number} is selected, and {shown} is shown so"

    @pytest.mark.parametrize(("wait_s", "is_named"), [(0.4, True), (8.0, False)])
    def test_a_rank_late_by_milliseconds_is_not_named_while_ranks_wait_for_seconds(
        self, wait_s: float, is_named: bool
    ) -> None:
        status = job_samples.make_job(4)
        waits = [replace(rank, collective="all_reduce #6 of default_pg", collective_s=wait_s) for rank in status.ranks]
        slow = replace(status.slow_ranks[0], global_rank=3, late_s=0.0041, is_chronic=True)
        rows = draw(replace(status, ranks=tuple(waits), slow_ranks=(slow,)), size=WIDE)
        assert any("0.0041 s late" in row for row in rows) is is_named

    def test_what_is_wider_than_the_screen_is_folded(self) -> None:
        line = (
            "t/1 was ended by SIGKILL; started again: 1 of 3 retries used; attempt 0, 3 restarts left; 1 of 2 nodes run"
        )
        note = "all 2 ranks wait at step 255, after 0.1 s; torch's own timeout of collectives keeps running"
        rows = draw(job_samples.make_job(), View(note=note), line=line)
        text = " ".join(row.strip() for row in rows)
        assert line in text
        assert note in text

    def test_what_stands_together_in_the_header_is_not_parted(self) -> None:
        status = replace(job_samples.make_job(8, 1), step=170, total=100_000, eta_s=5220.0)
        status = replace(status, values=(("loss", 0.452489),))
        rows = draw(status)
        (at,) = (at for at, row in enumerate(rows) if "step 170 of 100000" in row)
        assert rows[at].rstrip().endswith("loss 0.452489")
        assert rows[at + 1].startswith("ETA 1 h 27 min")

    @pytest.mark.parametrize("ranks", [1, 8, 14])
    def test_a_reason_has_several_rows(self, ranks: int) -> None:
        line = " ".join(f"word{at:02}" for at in range(30))
        job = replace(job_samples.make_job(ranks, 1), events=())
        shown = draw(job, line=line)
        assert [row.startswith("word") for row in shown[1:5]] == [True, True, True, False]
        assert not any("  word" in row for row in shown), "where rows are joined there is one blank"

    def test_a_column_that_has_had_something_stays(self) -> None:
        """The others moved with each look in which a rank was a step behind, or in a collective."""
        job, known = job_samples.make_job(8, 2), set()
        quiet = replace(
            job, ranks=tuple(replace(each, lag_steps=0, collective="", collective_s=None) for each in job.ranks)
        )
        heads = [
            next(row for row in draw_job(make_picture(each), View(), known, PLAIN) if row.startswith("RANK")).split()
            for each in (quiet, job, quiet)
        ]
        assert {"LAG", "COLLECTIVE"}.isdisjoint(heads[0])
        assert {"LAG", "COLLECTIVE"} <= set(heads[1])
        assert heads[1] == heads[2]

    def test_nodes_have_the_number_of_their_replica_also_after_one_was_lost(self) -> None:
        """As in the line of the loss: the others' group ranks change with it."""
        job = job_samples.make_job(6, 3)
        nodes = tuple(
            replace(each, node_index=each.node_index + (each.node_index > 0), host="one-host") for each in job.nodes
        )
        spare = NodeStatus(node_index=1, host="one-host", state=NodeState.SPARE)
        rows = draw(replace(job, nodes=(*nodes, spare)))
        at = next(at for at, row in enumerate(rows) if row.startswith("NODE"))
        assert [row.split()[0] for row in rows[at + 1 : at + 5]] == ["0", "2", "3", "1"]
        at = next(at for at, row in enumerate(rows) if row.startswith("RANK"))
        assert [row.split()[1] for row in rows[at + 1 : at + 7]] == ["0", "0", "2", "2", "3", "3"]

    def test_the_reason_of_a_restart_is_said_once(self) -> None:
        rows = "\n".join(draw(job_samples.make_crash(4, 1)))
        assert "2 recoveries\n" in re.sub(" +\n", "\n", rows)
        assert rows.count("ended by SIGKILL") == 2, "as the reason, and as an event"

    def test_a_job_whose_workers_have_not_begun_says_so(self) -> None:
        assert "have reported nothing" in draw(None)[2]
        ended = draw(None, state="FAILED", has_ended=True)
        assert not any("told nothing" in row for row in ended)

    @pytest.mark.parametrize(("height", "events"), [(24, 6), (40, 22), (50, 32)])
    def test_events_have_the_room_that_nothing_else_needs(self, height: int, events: int) -> None:
        told = tuple(JobEvent(time_s=job_samples.NOW_S, text=f"round {at} formed") for at in range(32))
        status = replace(job_samples.make_job(8, 1), events=told)
        rows = draw(status, size=replace(PLAIN, height=height))
        assert len(rows) == height
        assert [row.split()[2] for row in rows if row.endswith("formed")] == [f"{at}" for at in range(32 - events, 32)]
        assert sum(row.lstrip()[:1].isdigit() and "epoch" in row for row in rows) == 8, "all ranks are there"

    def test_of_a_job_that_has_ended_nothing_can_be_asked(self) -> None:
        assert draw(job_samples.make_job(), state="FAILED", has_ended=True)[-1].split()[-2:] == ["q", "quit"]

    def test_what_p_does_while_the_job_is_paused(self) -> None:
        status = replace(job_samples.make_job(), state=JobState.PAUSED)
        assert "p go on" in draw(status)[-1]

    def test_time_that_is_lost_is_named_from_a_second_on(self) -> None:
        goodput = Goodput(fraction=0.7, productive_s=60.0, lost_s=(("start", 0.9), ("restart", 0.5), ("round", 0.4)))
        page = "\n".join(
            print_once(make_picture(replace(job_samples.make_job(), goodput=goodput)), 120, has_colours=False)
        )
        assert "(lost: start 1 s)" in page
        status = replace(job_samples.make_job(), goodput=replace(goodput, productive_s=3.0))
        assert "lost" not in "\n".join(print_once(make_picture(status), 120, has_colours=False)), "it has just begun"

    def test_the_nodes_of_a_job_that_has_ended_do_not_run(self) -> None:
        picture = make_picture(job_samples.make_job(4, 2), state="FAILED", has_ended=True)
        page = "\n".join(print_once(picture, 120, has_colours=False))
        assert page.count(" ended ") == 2 + 4
        assert "running" not in page

    def test_a_page_has_everything(self) -> None:
        status = job_samples.make_hang(64, 8)
        rows = "\n".join(print_once(make_picture(status), 200, has_colours=False))
        assert all(f"{rank} " in rows for rank in range(64))
        assert all(f"host-{node}" in rows for node in range(8))
        assert "\x1b" not in rows

    def test_a_terminal_without_unicode(self) -> None:
        size = Size(width=80, height=24, has_colours=False, has_styles=False, is_unicode=False)
        status = job_samples.make_job()
        assert "".join(draw_job(make_picture(status), View(), set(), size)).isascii()

    def test_all_jobs(self) -> None:
        jobs = JobList(
            rows=[JobRow(handle=f"local_cwd://job-{at}", state="FAILED", line="boom") for at in range(50)],
            unreachable=["kubernetes is not reachable: no route"],
        )
        for height in (1, 5, 24):
            rows = draw_jobs(jobs, View(screen=ScreenKind.JOBS, selected=49, rows=50), Size(width=80, height=height))
            assert len(rows) == height
        text = "\n".join(map(strip, rows))
        assert "local_cwd://job-49" in text
        assert "is not reachable: " in text

    def test_a_text_shows_escapes_as_text(self) -> None:
        rows = draw_text("log", ["a\x1b[2Jb", "x\ty"], View(screen=ScreenKind.TEXT, page=20), Size(width=80, height=24))
        assert strip(rows[1]) == "a\\x1b[2Jb"


class _Jobs:
    """The `Jobs` of one job."""

    def __init__(self, *pictures: JobPicture) -> None:
        self._pictures = list(pictures)
        self.asked: list[KeyAction] = []

    def list_jobs(self) -> JobList:
        return JobList(rows=[JobRow(handle="local_cwd://a", state="RUNNING", line="")])

    def read_job(self, handle: str) -> JobPicture:
        if not self._pictures:
            raise ControlError(f"no job is named {handle!r}", CommandExit.UNKNOWN)
        return self._pictures.pop(0) if len(self._pictures) > 1 else self._pictures[0]


class _Reader(Reader):
    """Runs each call at once; `told` is what the next `get` returns."""

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self.told: list[object] = []

    def get(self) -> list:
        told, self.told = self.told, []
        return told

    def tell(self, content: object, origin: Origin | KeyAction) -> None:
        self.told.append((origin, content))

    def answer(self, view: TopView, line: str, action: KeyAction) -> None:
        self.tell(Answer(outcome=AskOutcome.DONE, line=line), action)
        view.take()

    def repeat(self, read: Callable[[], object]) -> None:
        try:
            self.tell(read(), Origin.LOOK)
        except ControlError as error:
            self.tell(error, Origin.LOOK)

    def run(self, action: KeyAction, ask: Callable[[], Answer]) -> None:
        self.pending = action, ask


def make_view(handle: str | None = "local_cwd://a", **changes: object) -> tuple[TopView, _Reader]:
    reader = _Reader()
    view = TopView(_Jobs(make_picture(job_samples.make_job(), **changes)), reader, handle)
    view.start()
    view.take()
    return view, reader


class TestView:
    def test_a_second_request_waits_for_the_first(self) -> None:
        view, reader = make_view()
        view.draw(PLAIN)
        view.press("c")
        view.press("p")
        assert any("wait for that" in row for row in view.draw(PLAIN))
        reader.answer(view, "all ranks have saved at step 9", KeyAction.CHECKPOINT)
        assert any("saved at step 9" in row for row in view.draw(PLAIN))
        view.press("s")
        assert any("stacks" in row for row in view.draw(PLAIN))

    def test_a_refused_request_is_a_line_and_the_next_one_goes(self) -> None:
        view, reader = make_view()
        view.press("p")
        reader.tell(ControlError("no agent answers", CommandExit.LOST), KeyAction.PAUSE)
        view.take()
        assert any("no agent answers" in row for row in view.draw(PLAIN))
        view.press("c")
        assert any("at one step" in row for row in view.draw(PLAIN))

    def test_a_look_that_fails_does_not_end_a_request(self) -> None:
        view, reader = make_view()
        view.press("c")
        reader.tell(ControlError("the engine does not answer", CommandExit.LOST), Origin.LOOK)
        view.take()
        assert any("engine does not" in row for row in view.draw(PLAIN))
        view.press("p")
        assert any("wait for that" in row for row in view.draw(PLAIN))

    def test_stacks_can_be_seen_while_a_pause_waits_for_a_rank(self) -> None:
        view, reader = make_view()
        view.draw(PLAIN)
        view.press("p")
        view.press("h")
        assert reader.pending[0] is KeyAction.WAITS
        view.press("s")
        assert any("wait for that" in row for row in view.draw(PLAIN))
        reader.answer(view, "rank 5 has not reached step 955", KeyAction.WAITS)
        assert any("rank 5 has not" in row for row in view.draw(PLAIN))
        view.press("escape")
        reader.answer(view, "all ranks wait at step 955", KeyAction.PAUSE)
        assert any("wait at step 955" in row for row in view.draw(PLAIN))

    @pytest.mark.parametrize(("state", "words"), [("running", "to pause at one step"), ("paused", "to go on")])
    def test_what_p_asks_for_is_said(self, state: str, words: str) -> None:
        view, reader = make_view()
        reader.tell(make_picture(replace(job_samples.make_job(), state=JobState(state))), Origin.LOOK)
        view.take()
        view.press("p")
        assert any(f"asks all ranks {words} ..." in row for row in view.draw(PLAIN))

    def test_a_job_that_is_not_there_ends_the_view(self) -> None:
        reader = _Reader()
        view = TopView(_Jobs(), reader, "gone")
        view.start()
        view.take()
        assert view.failure.exit_code is CommandExit.UNKNOWN

    def test_the_selected_rank_stays_selected_when_the_order_changes(self) -> None:
        view, reader = make_view()
        view.draw(PLAIN)
        for _ in range(5):
            view.press("down")
        view.draw(PLAIN)
        reader.tell(make_picture(job_samples.make_crash(64, 1)), Origin.LOOK)
        view.take()
        rows = view.draw(PLAIN)
        assert len(rows) == 24
        assert view._find_rank() == (0, 5)

    def test_a_rank_that_fails_is_seen_by_a_person_who_has_selected_none(self) -> None:
        view, reader = make_view()
        view.draw(PLAIN)
        reader.tell(make_picture(job_samples.make_crash(64, 1)), Origin.LOOK)
        view.take()
        assert any(row.startswith("  63 ") for row in view.draw(PLAIN))
        assert view._find_rank() == (0, 63)

    def test_a_job_that_has_ended_shows_what_its_agents_told_last(self) -> None:
        view, reader = make_view()
        view.draw(PLAIN)
        reader.tell(make_picture(state="SUCCEEDED", has_ended=True, line="after 3 s"), Origin.LOOK)
        view.take()
        page = "\n".join(view.draw(PLAIN))
        assert "8120 of 20000 steps" in page
        assert "ETA" not in page
        assert "a second" not in page
        assert view._find_rank() == (0, 0), "its log is still a key away"

    def test_what_was_asked_is_not_said_again_after_the_answer(self) -> None:
        view, reader = make_view()
        view.draw(PLAIN)
        view.press("h")
        reader.answer(view, "no rank waits", KeyAction.WAITS)
        view.press("escape")
        assert "asks all ranks" not in "\n".join(view.draw(PLAIN))

    @pytest.mark.parametrize("line", ["x" * 200 + " the end", "日本" * 60 + " the end"])
    def test_a_line_of_a_text_is_folded_and_found_again(self, line: str) -> None:
        view, reader = make_view()
        view.draw(PLAIN)
        view.press("h")
        reader.answer(view, line, KeyAction.WAITS)
        rows = view.draw(PLAIN)
        assert any("the end" in row for row in rows)
        assert max(map(cell_len, rows)) <= PLAIN.width
        view.draw(Size(width=20, height=8))
        view._lines += [f"line {at}" for at in range(50)] + ["the end"]
        for key in ("home", "/", *"the end", "enter"):
            view.press(key)
        assert view._view.top == 0
        view.draw(Size(width=20, height=8))
        view.press("n")
        assert "the end" in view.draw(Size(width=20, height=8, has_colours=False, has_styles=False))[-2]

    def test_of_a_long_log_the_first_lines_are_forgotten(self) -> None:
        folds = Folds()
        lines = ["a" * 25, "b", "c" * 11]
        assert list(folds.update(lines, 10)) == ["a" * 10, "a" * 10, "a" * 5, "b", "c" * 10, "c"]
        assert folds.drop(1) == 3
        assert list(folds.update([*lines[1:], "d"], 10)) == ["b", "c" * 10, "c", "d"]
        assert folds.starts == [0, 1, 3]
        assert list(folds.update(lines[:1], 25)) == ["a" * 25]
        assert folds.drop(9) == 1

    def test_without_colours_the_selected_row_stands_out(self) -> None:
        view, _ = make_view()
        rows = view.draw(Size(width=80, height=24, has_colours=False))
        assert [row for row in rows if "\x1b[7m" in row]
        assert not re.search(r"\x1b\[[0-9;]*[34]\dm", "".join(rows))

    def test_from_the_list_to_a_job_and_back(self) -> None:
        view, _ = make_view(None)
        assert any("local_cwd://a" in row for row in view.draw(PLAIN))
        view.press("enter")
        view.take()
        assert "Esc list" in view.draw(PLAIN)[-1]
        view.press("escape")
        view.take()
        assert "Enter open" in view.draw(PLAIN)[-1]


class TestPlain:
    def test_a_line_per_change_and_one_a_minute(self) -> None:
        changes = Changes()
        status = job_samples.make_job()
        assert len(list(changes.list_new(make_picture(status), 0.0))) == len(status.events) + 1
        assert not list(changes.list_new(make_picture(status), 1.0))
        event = JobEvent(time_s=0.0, text="rank 3 exited\x1b[2J")
        (line,) = changes.list_new(make_picture(replace(status, events=(*status.events, event))), 2.0)
        assert line.endswith("rank 3 exited\\x1b[2J")
        (line,) = changes.list_new(make_picture(replace(status, events=(*status.events, event))), 70.0)
        assert line.endswith("RUNNING: attempt 1")
        (line,) = changes.list_new(make_picture(status, state="FAILED", line="boom"), 71.0)
        assert line.endswith("FAILED: boom")

    def test_it_ends_with_the_job(self) -> None:
        jobs = _Jobs(make_picture(), make_picture(state="SUCCEEDED", has_ended=True, exit_code=0, line="after 3 s"))
        lines: list[str] = []
        assert follow(jobs, "local_cwd://a", lines.append, sleep=lambda _: None).state == "SUCCEEDED"
        assert [line.split(" ", 1)[1] for line in lines] == ["RUNNING: attempt 1", "SUCCEEDED: after 3 s"]


@pytest.mark.parametrize(
    ("width", "device", "found"),
    [
        (80, DeviceStatus(temperature_c=71, power_w=642), None),
        (200, DeviceStatus(temperature_c=71, power_w=642), "71 C, 642 W"),
        (80, DeviceStatus(temperature_c=71, slowed_by="power cap", last_xid=79, xids=1), "Xid 79, power"),
        (80, DeviceStatus(is_lost=True, ecc_uncorrected=2), "lost, 2 memory"),
    ],
)
def test_what_is_wrong_with_a_ranks_device(width: int, device: DeviceStatus, found: str | None) -> None:
    job = job_samples.make_job(ranks=2)
    job = replace(job, ranks=(job.ranks[0], replace(job.ranks[1], device=device)))
    rows = draw(job, size=replace(PLAIN, width=width))
    assert any("DEVICE" in row for row in rows) == (found is not None)
    assert found is None or sum(found in row for row in rows) == 1


def test_nodes_of_one_machine_have_numbers() -> None:
    status = job_samples.make_job(8, 2)
    one_host = replace(status, nodes=tuple(replace(node, host="host-0") for node in status.nodes))
    for each, expected in ((status, {"host-0", "host-1"}), (one_host, {"0", "1"})):
        rows = draw(each, size=replace(PLAIN, width=200, height=50))
        first = next(at for at, row in enumerate(rows) if row.startswith("RANK"))
        assert {row.split()[1] for row in rows[first + 1 : first + 9]} == expected


def test_who_waits_for_whom() -> None:
    status = job_samples.make_hang(8, 1)
    lines = describe_waits(Answer(outcome=AskOutcome.DONE, line="rank 1 did not enter all_reduce #8121"), status)
    assert "enter all_reduce #8121" in lines[0]
    assert any(each.startswith("ranks 0, 2-7: ") and each.endswith(" 319 s") for each in lines)
    assert any(each.startswith("rank 1: in none") for each in lines)
    assert status.state is JobState.HUNG
