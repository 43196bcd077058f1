"""Which ranks a hang is blamed on, from what the flight recorders of all ranks say; the texts are written by hand."""

import base64
import json
import random
import zlib

import pytest

from muster._shared.codec import MalformedMessageError, decode, encode
from muster._shared.records import replace
from muster._shared.reports import ENDED, ENTRY_LIMIT, Collective, Group, RankView, Stack
from muster.agent.features.hangs.collectives import find_cause
from muster.agent.features.hangs.judge import describe_slow_ranks
from muster.agent.features.hangs.reading import KnownGroups, read_groups, read_recorder


def call(number: int, operation: str = "all_reduce", *, age_s: float = 62.0, done: bool = False) -> Collective:
    sizes = "" if operation == "barrier" else "4 x float32"
    return Collective(number=number, operation=operation, sizes=sizes, age_s=age_s, is_done=done)


def group(*entries: Collective, ranks: tuple[int, ...] = (), name: str = "0", of: str = "default_pg") -> Group:
    return Group(
        name=name,
        description=of,
        entered=max((entry.number for entry in entries), default=0),
        completed=max((entry.number for entry in entries if entry.is_done), default=0),
        ranks=ranks,
        entries=entries,
    )


def view(rank: int, *groups: Group, state: str = "S", answers: bool = True, inside_init: bool = False) -> RankView:
    return RankView(
        global_rank=rank,
        node=rank // 2,
        host=f"main{rank // 2}",
        state=state,
        is_answering=answers,
        has_server=True,
        is_initialising=inside_init,
        groups=groups,
    )


ALL = (0, 1, 2, 3)
WAITS = group(call(5, done=True), call(6), ranks=ALL)
ABSENT = group(call(5, done=True), ranks=ALL)


def explain(*views: RankView) -> tuple[list[int], str]:
    found = find_cause(views)
    return sorted(found.ranks), found.clause


def test_a_rank_that_did_not_enter() -> None:
    assert explain(view(0, WAITS), view(1, ABSENT), view(2, WAITS), view(3, WAITS)) == (
        [1],
        "did not enter all_reduce #6 of default_pg (4 x float32); ranks 0, 2-3 have waited in it for 62 s",
    )


def test_several_ranks_that_did_not_enter() -> None:
    assert explain(view(0, WAITS), view(1, ABSENT), view(2, ABSENT), view(3, WAITS))[0] == [1, 2]


def test_a_rank_that_is_behind_by_many() -> None:
    """The others went on with collectives that do not wait for it: it is named with the one it did not enter."""
    ahead = group(call(6, age_s=62.0), call(7, age_s=61.0), call(8, age_s=60.0), ranks=ALL)
    assert explain(view(0, ahead), view(1, ABSENT), view(2, ahead), view(3, ahead)) == (
        [1],
        "did not enter all_reduce #6 of default_pg (4 x float32); ranks 0, 2-3 have waited in it for 62 s",
    )


def test_another_operation() -> None:
    other = group(call(5, done=True), call(6, "barrier", age_s=61.0), ranks=ALL)
    assert explain(view(0, WAITS), view(1, WAITS), view(2, other), view(3, WAITS)) == (
        [2],
        (
            "entered barrier #6 of default_pg where ranks 0-1, 3 entered all_reduce (4 x float32); "
            "they have waited for 62 s"
        ),
    )


def test_another_size() -> None:
    longer = Collective(number=6, operation="all_reduce", sizes="8 x float32", age_s=61.0, is_done=False)
    pair = group(call(5, done=True), call(6), ranks=(0, 1))
    assert explain(view(0, pair), view(1, group(call(5, done=True), longer))) == (
        [1],
        (
            "entered all_reduce #6 of default_pg (8 x float32) where rank 0 entered all_reduce (4 x float32); "
            "they have waited for 62 s"
        ),
    )


@pytest.mark.parametrize("operation", ["broadcast", "_allgather_base", "reduce_scatter"])
def test_sizes_that_may_differ(operation: str) -> None:
    """A broadcast's receivers, or uneven parts, are no disagreement."""
    first = Collective(number=1, operation=operation, sizes="4 x float32", age_s=9.0, is_done=False)
    second = Collective(number=1, operation=operation, sizes="5 x float32", age_s=9.0, is_done=False)
    ranks, clause = explain(view(0, group(first)), view(1, group(second)))
    assert (ranks, "hangs" in clause) == ([], True)


def test_all_have_entered() -> None:
    assert explain(*[view(rank, WAITS) for rank in ALL]) == (
        [],
        (
            "entered all_reduce #6 of default_pg (4 x float32) 62 s ago and did not complete it: "
            "the network or a device hangs"
        ),
    )


def test_a_rank_of_a_subgroup_that_never_entered_anything_in_it() -> None:
    pair = group(call(1, "barrier", age_s=30.0), ranks=(0, 3), name="1", of="")
    assert explain(view(0, ABSENT, pair), view(1, ABSENT), view(2, ABSENT), view(3, ABSENT)) == (
        [3],
        "did not enter barrier #1 of group 1 of ranks 0, 3; rank 0 has waited in it for 30 s",
    )


def test_who_waits_elsewhere_is_not_the_cause() -> None:
    """Rank 1 is missing in the job's group since it waits for rank 3, which is nowhere."""
    pair = group(call(1, "barrier", age_s=10.0), ranks=(1, 3), name="7", of="tp")
    ranks, clause = explain(
        view(0, WAITS), view(1, ABSENT, pair), view(2, WAITS), view(3, ABSENT, group(name="7", of="tp"))
    )
    assert (ranks, clause.split(";")[0]) == ([3], "did not enter barrier #1 of tp of ranks 1, 3")


def test_of_two_groups_that_wait_the_one_that_waits_longest_counts() -> None:
    """Nothing connects them: two hangs at once."""
    first = group(call(1, "barrier", age_s=90.0), ranks=(0, 1), name="1", of="left")
    second = group(call(1, "barrier", age_s=70.0), ranks=(2, 3), name="2", of="right")
    ranks, clause = explain(view(0, first), view(1), view(2, second), view(3))
    assert (ranks, clause.split(";")[0]) == ([1], "did not enter barrier #1 of left of ranks 0-1")


def test_a_stopped_rank() -> None:
    """It does not answer: how far it is cannot be read."""
    stopped = view(1, group(ranks=ALL), state="T", answers=False)
    assert explain(view(0, WAITS), stopped, view(2, WAITS), view(3, WAITS)) == (
        [1],
        "is stopped (SIGSTOP); ranks 0, 2-3 have waited in all_reduce #6 of default_pg (4 x float32) for 62 s",
    )


def test_a_collective_that_does_not_wait_for_all() -> None:
    """The broadcast that rank 1 did not enter is over for the others; they wait for it in a later all-reduce."""
    sent = group(call(5, done=True), call(6, "broadcast", done=True), call(7, age_s=30.0), ranks=ALL)
    assert explain(view(0, sent), view(1, ABSENT), view(2, sent), view(3, sent)) == (
        [1],
        "did not enter all_reduce #7 of default_pg (4 x float32); ranks 0, 2-3 have waited in it for 30 s",
    )


def test_the_first_of_several_that_are_not_complete() -> None:
    several = group(call(5, done=True), call(6, age_s=62.0), call(7, age_s=61.0), ranks=(0, 1))
    ranks, clause = explain(view(0, several), view(1, several))
    assert (ranks, clause.partition(" and ")[0]) == ([], "entered all_reduce #6 of default_pg (4 x float32) 62 s ago")


def ended(rank: int) -> RankView:
    return RankView(global_rank=rank, node=rank // 2, host=f"main{rank // 2}", state=ENDED)


def test_ranks_of_which_nothing_is_known_are_not_blamed() -> None:
    """Each node judges alone with a backend of torch's; or no message had room for their views."""
    assert explain(view(0, WAITS), view(1, WAITS)) == (
        [],
        (
            "entered all_reduce #6 of default_pg (4 x float32) 62 s ago and did not complete it; "
            "nothing is known here of ranks 2-3 (see the log of their node)"
        ),
    )
    assert explain(view(0, WAITS), view(1, ABSENT))[0] == [1]


def test_a_rank_in_an_uninterruptible_system_call() -> None:
    """As when its node is paged out, or a network disk does not answer; whether or not its server still answers."""
    waits = "ranks 0, 2-3 have waited in"
    silent = view(1, group(ranks=ALL), state="D", answers=False)
    assert explain(view(0, WAITS), silent, view(2, WAITS), view(3, WAITS)) == (
        [1],
        f"is in an uninterruptible system call; {waits} all_reduce #6 of default_pg (4 x float32) for 62 s",
    )
    answers = view(1, ABSENT, state="D")
    assert explain(view(0, WAITS), answers, view(2, WAITS), view(3, WAITS)) == (
        [1],
        (
            f"did not enter all_reduce #6 of default_pg (4 x float32); {waits} it for 62 s; "
            "rank 1 is in an uninterruptible system call"
        ),
    )


def test_a_rank_that_has_ended() -> None:
    assert explain(view(0, WAITS), view(2, WAITS), ended(1), ended(3)) == (
        [1, 3],
        "have ended; ranks 0, 2 have waited in all_reduce #6 of default_pg (4 x float32) for 62 s",
    )


def test_a_rank_that_never_came_to_its_process_group() -> None:
    outside = RankView(global_rank=1, node=0, host="main0", state="S")
    assert explain(view(0, inside_init=True), outside) == (
        [1],
        "did not call init_process_group, in which rank 0 waits",
    )


def test_a_rank_that_is_stopped_before_its_process_group() -> None:
    """Its server listens, for torch is imported, and does not answer."""
    inside = [view(rank, inside_init=True) for rank in (0, 2)]
    assert explain(*inside, view(1, state="T", answers=False)) == (
        [1],
        "is stopped (SIGSTOP); ranks 0, 2 wait in init_process_group",
    )
    assert explain(*inside) == ([], "called init_process_group, and did not come back from it")


def test_nothing_is_said_without_evidence() -> None:
    assert find_cause([]) is None
    assert find_cause([view(0, ABSENT), view(1, ABSENT)]) is None
    assert find_cause([RankView(global_rank=0, node=0, host="")]) is None


def send(view: RankView) -> Stack:
    """What the leader reads of a stack with this view."""
    return decode(Stack, json.loads(encode(Stack(global_rank=0, node=0, local_rank=0, text="", view=view), 1 << 20)))


def test_a_view_travels() -> None:
    whole = view(1, WAITS, state="T", answers=False)
    assert send(whole).view == whole


def test_a_view_that_is_too_long_loses_its_oldest_entries() -> None:
    names = random.Random(1)
    many = [
        group(*[call(n, operation=names.randbytes(40).hex()) for n in range(400)], name=names.randbytes(60).hex())
        for _ in range(300)
    ]
    arrived = send(view(0, *many)).view
    assert [each.name for each in arrived.groups] == [each.name for each in many[-len(arrived.groups) :]]
    assert all(each.entries[-1] == many[0].entries[-1] or each.entries[-1].number == 399 for each in arrived.groups)


def test_a_view_for_which_there_is_no_room_is_left_out() -> None:
    stack = Stack(global_rank=0, node=0, local_rank=0, text="x" * 600, view=view(0, WAITS))
    short = decode(Stack, json.loads(encode(stack, 60_000)))
    assert short == replace(stack, view=None)


def pack(text: str) -> str:
    return base64.b85encode(zlib.compress(text.encode())).decode()


@pytest.mark.parametrize(
    ("packed", "why"),
    [
        ("", "not compressed JSON"),
        ("x", "not compressed JSON"),
        ("€", "not compressed JSON"),
        (pack("[" * 100_000), "not compressed JSON"),
        (pack(json.dumps([*range(1000)]))[:-40], "not compressed JSON"),
        (pack("{}"), "'global_rank' is missing"),
        (pack("[]"), "not an object"),
        (pack('{"global_rank": -1, "node": 0, "host": ""}'), "'global_rank'"),
        (pack('{"global_rank": 0, "node": 0, "host": 1}'), "'host'"),
        (pack('{"global_rank": 0, "node": 0, "host": "", "groups": [{"name": "0"}]}'), "'description' is missing"),
        (pack(" " * (2 << 20) + "{}"), "not compressed JSON"),
        ("x" * 40_000, "longer than 32768 bytes"),
    ],
)
def test_a_view_that_is_none_is_refused_as_any_message(packed: str, why: str) -> None:
    with pytest.raises(MalformedMessageError, match=why):
        decode(Stack, {"global_rank": 0, "node": 0, "local_rank": 0, "text": "", "view": packed})


GLOO = json.dumps(
    {
        "entries": [
            {
                "collective_seq_id": number,
                "input_dtypes": ["Float"],
                "input_sizes": [[2, 3]],
                "is_p2p": False,
                "p2p_seq_id": 0,
                "pg_id": 0,
                "process_group": ["0", "default_pg"],
                "profiling_name": "gloo:all_reduce",
                "retired": number < 6,
                "state": "scheduled",
                "time_created_ns": 5_000_000_000,
            }
            for number in range(1, 7)
        ],
        "pg_status": {"0": {"last_completed_collective": "5", "last_enqueued_collective": "6"}},
        "version": "2.10",
    }
).encode()


def test_gloos_format() -> None:
    (read,) = read_recorder(GLOO, 8_000_000_000, {"0": (0, 1)})
    assert (read.name, read.description, read.entered, read.completed, read.ranks) == ("0", "default_pg", 6, 5, (0, 1))
    last = Collective(number=6, operation="all_reduce", sizes="2x3 x float32", age_s=3.0, is_done=False)
    assert read.entries[-1] == last


def test_a_collectives_timeout() -> None:
    data = json.loads(GLOO)
    data["entries"] = [{**data["entries"][0], "timeout_ms": 77500}]
    (read,) = read_recorder(json.dumps(data).encode(), 8_000_000_000, {})
    assert read.entries[0].timeout_s == 77.5


def test_of_many_open_collectives_the_first_is_kept() -> None:
    """All of them may be open at once; the rank waits in the first."""
    data = json.loads(GLOO)
    entry = data["entries"][0]
    data["entries"] = [{**entry, "collective_seq_id": number, "retired": number < 6} for number in range(1, 46)]
    (read,) = read_recorder(json.dumps(data).encode(), 8_000_000_000, {"0": (0, 1)})
    assert [each.number for each in read.entries] == [*range(6, 14), *range(38, 46)]
    assert len(read.entries) == ENTRY_LIMIT


@pytest.mark.parametrize(
    "text",
    [
        *[b"", b"[]", b"{", b'{"entries": 3}', b'{"entries": [1, {"process_group": []}, {"process_group": ["0"]}]}'],
        *[GLOO[:100], GLOO.replace(b'"6"', b'"x"'), GLOO.replace(b"5000000000", b'"soon"')],
    ],
)
def test_other_formats_raise_nothing(text: bytes) -> None:
    read_recorder(text, 0, {})


def test_a_collectives_age_by_todays_clock() -> None:
    """Nanoseconds since 1970 are more than 2^53."""
    entry = {"process_group": ["0", "default_pg"], "collective_seq_id": 1, "time_created_ns": 1_795_407_700_000_000_000}
    (found,) = read_recorder(json.dumps({"entries": [entry]}).encode(), 1_795_407_704_500_000_000, {})
    assert found.entries[0].age_s == 4.5


def test_the_file_of_groups() -> None:
    lines = b"""{"init": true}
{"group": "0", "ranks": [0, 1], "device_timeout_s": 600.0}
{"group": "1", "ranks": [1], "device_timeout_s": 55.5}
{"group": "2", "ranks": [1]}
{"gro"""
    groups = {"0": (0, 1), "1": (1,), "2": (1,)}
    assert read_groups(lines) == KnownGroups(is_initialising=False, ranks=groups, device_timeout_s=55)
    begun = KnownGroups(is_initialising=True, ranks={}, device_timeout_s=0.0)
    assert read_groups(b'{"init": true}\n') == begun
    assert read_groups(lines + b'\n{"init": true}\n') == begun


def test_who_enters_last() -> None:
    """Ages count back from now: rank 1 entered both collectives later than the others."""
    early = group(call(1, age_s=9.0, done=True), call(2, age_s=5.0, done=True))
    late = group(call(1, age_s=8.5, done=True), call(2, age_s=3.0, done=True))
    assert describe_slow_ranks([view(0, early), view(1, late), view(2, early)]) == (
        "rank 1 was the last to enter 2 of the last 2 collectives, up to 2.0 s after the first"
    )
    assert describe_slow_ranks([view(0, early), view(1, early)]) is None
