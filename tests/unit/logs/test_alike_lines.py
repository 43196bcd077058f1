"""What several ranks say alike is there once, with the ranks that said it; nothing is lost, reordered or held long."""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import pytest
from doubles.masks import mask_line
from hypothesis import example, given
from hypothesis import strategies as st

from muster._shared.console import alike_lines, units
from muster._shared.console.alike_lines import WINDOW_S, AlikeLines, HeldUnit, format_ranks


class Speaker:
    """One stream of one rank."""

    def __init__(self, rank: int, launch: object = None, peers: int = 0, stream: str = "out") -> None:
        self.ranks = (rank,)
        self.launch = launch
        self.peers = peers
        self.stream = stream


Spoken = HeldUnit[Speaker]


def show(said: Iterable[Spoken]) -> list[tuple[str, bytes]]:
    return [(format_ranks(each.ranks[0] for each in unit.speakers), unit.text.rstrip(b"\n")) for unit in said]


def speak(alike: "AlikeLines[Speaker]", speakers: list[Speaker], rows: list[tuple[int, bytes]]) -> list[Spoken]:
    return [said for rank, row in rows for said in alike.push(speakers[rank], row + b"\n", 0.0)]


def merge(count: int) -> tuple[AlikeLines[Speaker], list[Speaker]]:
    return AlikeLines[Speaker](merges_lines=True), [Speaker(rank) for rank in range(count)]


def test_lines_of_all_ranks_are_printed_when_the_last_says_them() -> None:
    alike = AlikeLines[Speaker](merges_lines=True)
    ranks = [Speaker(rank, peers=3) for rank in range(3)]
    assert speak(alike, ranks, [(0, b"step 1 loss 0.5"), (2, b"step 1 loss 0.25")]) == []
    assert show(speak(alike, ranks, [(1, b"step 1 loss 0.125")])) == [("0-2", b"step 1 loss 0.5")]
    assert alike.due_s is None


def test_a_line_of_one_rank_waits_for_the_window() -> None:
    alike = AlikeLines[Speaker](merges_lines=True)
    alike.push(Speaker(0, peers=8), b"only rank 0 says this\n", 10.0)
    assert alike.due_s == 10.0 + WINDOW_S
    assert alike.take_due(10.0 + WINDOW_S * 0.9) == []
    assert show(alike.take_due(10.0 + WINDOW_S)) == [("0", b"only rank 0 says this")]
    assert alike.due_s is None


def test_count_and_order_are_kept() -> None:
    """A rank that says more, and one that says the same in another order."""
    alike, ranks = merge(3)
    rows = [(0, b"a"), (0, b"b"), (0, b"a"), (1, b"b"), (1, b"a"), (2, b"a"), (2, b"a"), (2, b"a")]
    speak(alike, ranks, rows)
    assert show(alike.take_all()) == [("0,2", b"a"), ("0-1", b"b"), ("0-2", b"a"), ("2", b"a")]


def test_a_line_of_one_rank_keeps_the_next_ones_together() -> None:
    """Ranks that are ahead have said much already."""
    alike, ranks = merge(3)
    rows = [(rank, row) for rank in range(3) for row in (b"step 1", b"rank %s" % b"abc"[rank : rank + 1], b"step 2")]
    speak(alike, ranks, rows)
    assert show(alike.take_all()) == [
        ("0-2", b"step 1"),
        *((str(rank), b"rank %s" % b"abc"[rank : rank + 1]) for rank in range(3)),
        ("0-2", b"step 2"),
    ]


def test_what_differs_stays_in_the_order_of_time() -> None:
    alike, ranks = merge(3)
    speak(alike, ranks, [(0, b"serves"), (1, b"connects"), (0, b"answers"), (2, b"serves"), (1, b"connects")])
    expected = [("0,2", b"serves"), ("1", b"connects"), ("0", b"answers"), ("1", b"connects")]
    assert show(alike.take_all()) == expected


def test_a_place_between_two_units_is_not_used_up() -> None:
    """Of many ranks each puts lines between the same two."""
    alike, ranks = merge(300)
    rows = [(rank, row) for rank in range(300) for row in (b"first", b"of " + bytes([97 + rank % 26]) * rank, b"last")]
    speak(alike, ranks, rows)
    shown = show(alike.take_all())
    assert sum(len(text) > 5 for _, text in shown) == 297
    assert shown[0] == ("0-299", b"first")
    assert sum(text == b"last" for _, text in shown) == 2, "after some 200 there is no number left"


def test_streams_are_not_mixed() -> None:
    alike = AlikeLines[Speaker](merges_lines=True)
    speak(alike, [Speaker(0), Speaker(1, stream="err")], [(0, b"a"), (1, b"a")])
    assert show(alike.take_all()) == [("0", b"a"), ("1", b"a")]


def test_workers_of_another_launch_are_not_compared() -> None:
    alike = AlikeLines[Speaker](merges_lines=True)
    alike.push(Speaker(0, launch="first"), b"a\n", 0.0)
    assert show(alike.push(Speaker(1, launch="second"), b"a\n", 0.0)) == [("0", b"a")]
    assert show(alike.take_all()) == [("1", b"a")]


TRACE = b'Traceback (most recent call last):\n  File "a.py", line 7\nValueError: bad\n'


def test_equal_tracebacks_are_one_and_others_stay_whole() -> None:
    alike, ranks = merge(4)
    for row in TRACE.splitlines(keepends=True):  # written row by row, all at the same time
        for rank in (0, 1, 3):
            assert alike.push(ranks[rank], row, 0.0) == []
        alike.push(ranks[2], row.replace(b"bad", b"worse"), 0.0)
    assert show(alike.take_all()) == [("0-1,3", TRACE.rstrip()), ("2", TRACE.replace(b"bad", b"worse").rstrip())]


def test_tracebacks_that_differ_in_the_address_of_a_peer_are_one() -> None:
    """A rank that fails closes a connection to each of the others."""
    alike = AlikeLines[Speaker](merges_lines=True)
    text = b"Connection closed by peer [127.0.0.1]:%d. This"
    for rank, port in enumerate((26544, 7331)):
        assert alike.push(Speaker(rank), TRACE.replace(b"bad", text % port), 0.0) == []
    alike.push(Speaker(2), TRACE.replace(b"line 7", b"line 8").replace(b"bad", text % 7331), 0.0)
    assert [ranks for ranks, _ in show(alike.take_all())] == ["0-1", "2"]


def test_a_traceback_that_is_written_slowly_is_not_held() -> None:
    alike = AlikeLines[Speaker](merges_lines=True)
    rank, rows = Speaker(0), TRACE.splitlines(keepends=True)
    assert alike.push(rank, rows[0], 0.0) == []
    assert show(alike.take_due(WINDOW_S)) == [("0", rows[0].rstrip())]
    assert alike.push(rank, rows[1], 1.0) == alike.push(rank, rows[2], 1.1) == []
    assert show(alike.take_due(1.0 + WINDOW_S)) == [("0", (rows[1] + rows[2]).rstrip())]
    assert show(alike.push(rank, b"step 2\n", 2.0)) == []
    assert show(alike.take_all()) == [("0", b"step 2")]


def test_equal_tracebacks_after_which_ranks_say_nothing_more_are_one() -> None:
    """At Ctrl-C `torchx run` printed that of each rank: each was printed at its time, before the next one was known."""
    alike = AlikeLines[Speaker](merges_lines=True)
    for rank in range(4):
        text = TRACE if rank != 2 else TRACE.replace(b"bad", b"worse")
        rows = b"".join(b"[rank%d]: %s" % (rank, row) for row in text.splitlines(keepends=True))
        assert alike.push(Speaker(rank, peers=4), rows, rank / 10) == []
    assert alike.due_s == WINDOW_S
    shown = show(alike.take_due(WINDOW_S))
    assert [ranks for ranks, _ in shown] == ["0-1,3"], "alike so far"
    assert [ranks for ranks, _ in show(alike.take_due(0.2 + WINDOW_S))] == ["2"]


WARNING = b"/x/torch/a.py:368: UserWarning: no NumPy\n  cpu = template()\n"


def test_without_merging_only_warnings_are_left_out_and_nothing_waits() -> None:
    alike = AlikeLines[Speaker](merges_lines=False)
    first, second = Speaker(0), Speaker(1)
    assert show(alike.push(first, b"a\n" + WARNING + b"b\n", 0.0)) == [("0", b"a"), ("0", WARNING[:-1]), ("0", b"b")]
    assert show(alike.push(second, b"a\n" + WARNING + b"b\n", 5.0)) == [("1", b"a"), ("1", b"b")]
    assert show(alike.push(second, WARNING, 6.0)) == [("1", WARNING[:-1])], "more often than any other"
    assert show(alike.push(first, TRACE, 7.0)) == [("0", TRACE[:-1])]
    late = alike.push(Speaker(2), WARNING, alike_lines.LAUNCH_S + 1.0)
    assert show(late) == [("2", WARNING[:-1])], "a job that runs warns of something else"
    assert alike.due_s is None


def test_a_warning_waits_for_its_second_row_only() -> None:
    alike = AlikeLines[Speaker](merges_lines=False)
    header, source = WARNING.splitlines(keepends=True)
    assert alike.push(Speaker(0), header, 1.0) == []
    assert alike.due_s == 1.0 + WINDOW_S
    assert show(alike.take_due(1.0 + WINDOW_S)) == [("0", header[:-1])]
    rank = Speaker(1)
    assert alike.push(rank, header.replace(b"no", b"old"), 2.0) == []
    assert show(alike.push(rank, source, 2.1)) == [("1", header.replace(b"no", b"old") + source[:-1])]


def test_a_late_rank_adds_no_warning_of_the_start() -> None:
    alike = AlikeLines[Speaker](merges_lines=True)
    alike.push(Speaker(0), WARNING, 0.0)
    alike.push(Speaker(1), WARNING, 0.1)
    assert show(alike.take_due(1.0)) == [("0-1", WARNING[:-1])]
    assert alike.push(Speaker(2), WARNING, 5.0) == []
    assert alike.take_all() == []


def test_a_rank_that_ends_leaves_what_it_said() -> None:
    alike = AlikeLines[Speaker](merges_lines=True)
    rank = Speaker(0)
    alike.push(rank, b"a\n" + TRACE[:50] + b"\n", 0.0)
    assert alike.end(rank, 0.0) == []
    assert [text for _, text in show(alike.take_all())] == [b"a", TRACE[:50]]


# -- for any history --------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """A rank writes rows, some time after the last event."""

    rank: int
    rows: list[bytes]
    after_s: float


EVENTS = st.lists(
    st.builds(
        Event,
        st.integers(0, 3),
        st.lists(
            st.sampled_from([b"step 1", b"step 22", b"loss nan", b"", b"\r50%\r100%", *TRACE.splitlines()]),
            min_size=1,
            max_size=4,
        ),
        st.sampled_from([0.0, 0.0, 0.1, 0.3, 1.0]),
    ),
    max_size=40,
)


def replay(events: list[Event], peers: int) -> list[tuple[float, Spoken]]:
    """All that is printed, with its time, by a console that looks when something is due."""
    alike = AlikeLines[Speaker](merges_lines=True)
    speakers = [Speaker(rank, peers=peers) for rank in range(4)]
    printed: list[tuple[float, Spoken]] = []
    now_s = 0.0
    for event in events:
        end_s = now_s + event.after_s
        while (due_s := alike.due_s) is not None and due_s <= end_s:
            now_s = max(now_s, due_s)
            printed += [(now_s, said) for said in alike.take_due(now_s)]
        now_s = end_s
        rows = b"".join(row + b"\n" for row in event.rows)
        printed += [(now_s, said) for said in alike.push(speakers[event.rank], rows, now_s)]
    return printed + [(now_s, said) for said in alike.take_all()]


@given(EVENTS, st.sampled_from([0, 4]))
def test_every_text_is_there_once_for_each_rank_and_in_its_order(events: list[Event], peers: int) -> None:
    printed = replay(events, peers)
    for rank in range(4):
        said = [mask_line(row) for event in events if event.rank == rank for row in event.rows]
        shown = [
            mask_line(row)
            for _, unit in printed
            if any(each.ranks == (rank,) for each in unit.speakers)
            for row in unit.text[:-1].split(b"\n")
        ]
        assert shown == said


@given(EVENTS)
def test_what_is_printed_is_what_its_first_rank_said(events: list[Event]) -> None:
    unseen = {rank: [row for event in events if event.rank == rank for row in event.rows] for rank in range(4)}
    for _, unit in replay(events, 0):
        first, rows = unit.speakers[0].ranks[0], unit.text[:-1].split(b"\n")
        assert unseen[first][: len(rows)] == rows
        for each in unit.speakers:
            del unseen[each.ranks[0]][: len(rows)]
    assert not any(unseen.values())


OPEN_TRACEBACK = [b"Traceback (most recent call last):", b"loss nan", b"\r50%\r100%"]


@given(EVENTS)
@example([Event(1, OPEN_TRACEBACK, 0.0), Event(0, OPEN_TRACEBACK, 0.1), Event(0, [b"step 1"], 0.0)])
def test_no_line_waits_longer_than_the_window(events: list[Event]) -> None:
    times = list(itertools.accumulate(event.after_s for event in events))
    said = {
        rank: [at_s for at_s, event in zip(times, events, strict=True) if event.rank == rank for _ in event.rows]
        for rank in range(4)
    }
    for at_s, unit in replay(events, 0):
        count = unit.text.count(b"\n")
        for each in unit.speakers:
            rank = each.ranks[0]
            assert at_s - min(said[rank][:count]) <= WINDOW_S + 1e-9
            del said[rank][:count]


# -- the work ---------------------------------------------------------------------------------------------------------


def count_work(monkeypatch: pytest.MonkeyPatch, rows: list[tuple[int, bytes]], ranks: int) -> int:
    """How many units were looked at, and how many lines were masked with the pattern."""
    looks = 0

    def look(unit: Spoken) -> int:
        nonlocal looks
        looks += 1
        return unit.number

    class Pattern:
        def sub(self, mask: bytes, line: bytes) -> bytes:
            nonlocal looks
            looks += 1
            return masked.sub(mask, line)

    masked = units._MASKED
    with monkeypatch.context() as patch:
        patch.setattr(alike_lines, "_NUMBER", look)
        patch.setattr(units, "_MASKED", Pattern())
        alike = AlikeLines[Speaker](merges_lines=True)
        speakers = [Speaker(rank, peers=ranks) for rank in range(ranks)]
        shown = speak(alike, speakers, rows) + alike.take_all()
    assert sum(len(unit.speakers) for unit in shown) == len(rows)
    return looks


@pytest.mark.parametrize("kind", ["alike", "different", "reversed", "one behind"])
def test_the_work_grows_with_the_number_of_lines_alone(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A place is found by bisection among at most 4,096 units, three times at most: 39 looks for a line."""

    def build(count: int) -> list[tuple[int, bytes]]:
        if kind == "alike":
            return [(rank, b"step %d loss 0.%d" % (step, rank)) for step in range(count) for rank in range(8)]
        words = [bytes(97 + int(digit) for digit in str(step)) for step in range(count)]
        if kind == "different":
            return [(rank, b"%s of %s" % (word, bytes([97 + rank]))) for word in words for rank in range(8)]
        if kind == "reversed":
            return [(rank, word) for rank in range(8) for word in (words if rank % 2 else words[::-1])]
        return [(0, b"step 1") for _ in words] + [(1, b"step 1") for _ in words]

    for count in (500, 4500):  # more than are held
        rows = build(count)
        assert count_work(monkeypatch, rows, 8) <= 42 * len(rows)


def test_ranks_that_say_different_things_very_fast_are_not_held_without_limit() -> None:
    alike = AlikeLines[Speaker](merges_lines=True)
    ranks = [Speaker(rank) for rank in range(2)]
    words = [bytes(97 + int(digit) for digit in str(step)) for step in range(20_000)]
    shown = speak(alike, ranks, [(0, word) for word in words])
    assert [unit.text.rstrip() for unit in shown] == words[: len(shown)]
    assert len(words) - len(shown) == alike_lines._HELD_LIMIT
