"""What a terminal shows that has the lines of all nodes of a job: alike ones once, with replicas, nodes and ranks."""

import io
import threading
from collections.abc import Iterator

import pytest
from doubles.samples import make_round
from hypothesis import given
from hypothesis import strategies as st

from muster.agent.logs.lines import build_common_prefix, build_prefix
from muster.schedulers.agent_command import count_merged_ranks
from muster.schedulers.runner.job_console import JobConsole, parse_ranks

PLAIN = {"TERM": "xterm", "NO_COLOR": "1"}


class Screen(io.StringIO):
    """A terminal; `await_text` returns when it shows a text."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Condition()

    def write(self, text: str) -> int:
        with self.written:
            self.written.notify_all()
            return super().write(text)

    def await_text(self, text: str) -> None:
        with self.written:
            assert self.written.wait_for(lambda: text in self.getvalue(), 60)


def make_lines(node: int, texts: list[str], local: int = 0, nodes: int = 2, role: str = "main") -> list[str]:
    """The lines as one rank of a node with two writes them."""
    formed = make_round(group_rank=node, group_world_size=nodes, rank_offset=2 * node, world_size=2 * nodes)
    prefix = build_prefix(role=role, local_rank=local, round=formed).decode()
    return [f"{prefix}{text}\n" for text in texts]


def print_together(*replicas: list[str], ranks: int = 4, role: str = "main") -> list[str]:
    """What is shown of replicas that all say their lines before any of them ends."""
    screen = Screen()
    console = JobConsole(screen, PLAIN)

    def read(index: int) -> Iterator[str]:
        yield from replicas[index]
        if index + 1 < len(replicas):
            console.print_lines(read(index + 1), role, index + 1, ranks)

    console.print_lines(read(0), role, 0, ranks)
    return screen.getvalue().splitlines()


def test_lines_of_several_nodes_are_shown_once() -> None:
    shown = print_together(
        [*make_lines(0, ["step 1 loss 0.5"]), *make_lines(0, ["step 1 loss 0.1", "x"], local=1)],
        [*make_lines(1, ["step 1 loss 0.2", "y"]), *make_lines(1, ["step 1 loss 0.4", "x"], local=1)],
    )
    assert shown == [
        "main/0-1 [main0-1|n0-1.r0-3]:step 1 loss 0.5",
        "main/0-1 [main1|n0-1.r1,3]:x",
        "main/1 [main0|n1.r2]:y",
    ]


def test_lines_that_each_node_has_merged_are_merged() -> None:
    rounds = [make_round(group_rank=node, group_world_size=2, rank_offset=4 * node, world_size=8) for node in range(2)]
    prefixes = [
        build_common_prefix(role="main", global_ranks=[4 * node + local for local in (0, 1, 3)], round=each).decode()
        for node, each in enumerate(rounds)
    ]
    assert prefixes == ["[main0-1,3|n0.r0-1,3]:", "[main0-1,3|n1.r4-5,7]:"]
    shown = print_together([f"{prefixes[0]}step 1\n"], [f"{prefixes[1]}step 1\n"], ranks=8)
    assert shown == ["main/0-1 [main0-1,3|n0-1.r0-1,3-5,7]:step 1"]


def test_a_prefix_of_one_node_and_a_role_with_digits() -> None:
    lines = [f"[gpu-2:{local}]:step {local}\n" for local in range(8)]
    assert print_together(lines, role="gpu-2", ranks=8) == ["gpu-2/0 [gpu-2:0-7]:step 0"]


@pytest.mark.parametrize("role", ["train64:", "llama3-8:", "main"])
def test_a_role_whose_name_ends_in_digits_in_colours(role: str) -> None:
    screen = Screen()
    lines = [f"[{role}{local}]:step 1\n" for local in range(12)] + [f"[{role}11]:alone\n"]
    JobConsole(screen, {"TERM": "xterm"}).print_lines(lines, role.rstrip(":"), 0, 12)
    assert f"\x1b[36m[{role}0-11]:\x1b[0mstep 1\n" in screen.getvalue()
    assert f"\x1b[33m[{role}11]:\x1b[0malone\n" in screen.getvalue()


@pytest.mark.parametrize(("text", "ranks"), [("0", (0,)), ("0-2,5", (0, 1, 2, 5)), ("", ())])
def test_ranks_of_a_prefix(text: str, ranks: tuple[int, ...]) -> None:
    assert parse_ranks(text) == ranks


def test_with_few_ranks_each_line_is_shown_and_warnings_once() -> None:
    warning = ["/x/torch/a.py:368: UserWarning: no NumPy", "  cpu = template()"]
    lines = [make_lines(node, ["loads", *warning, "step 1"]) for node in range(2)]
    assert print_together(*lines, ranks=0) == [
        *(f"main/0 {line}".rstrip() for line in lines[0]),
        *(f"main/1 {line}".rstrip() for line in (lines[1][0], lines[1][3])),
    ]


def test_lines_of_the_agent_and_of_other_programs_stand_where_they_were() -> None:
    lines = [*make_lines(0, ["a"]), "[muster] waits\n", "[info] b\n", "JOB FAILED  why\n", *make_lines(0, ["c"]), "end"]
    assert print_together(lines, ranks=8) == [f"main/0 {line}".rstrip() for line in lines]


def test_a_line_of_one_rank_is_shown_while_its_replica_says_nothing() -> None:
    screen = Screen()
    told = threading.Event()

    def read() -> Iterator[str]:
        yield from make_lines(0, ["alone"])
        assert told.wait(60)

    thread = threading.Thread(target=JobConsole(screen, PLAIN).print_lines, args=(read(), "main", 0, 8))
    thread.start()
    screen.await_text("main/0 [main0|n0.r0]:alone\n")
    told.set()
    thread.join()


def test_what_is_held_is_shown_when_the_console_is_closed_and_at_the_programs_end() -> None:
    for end in (JobConsole.close, JobConsole._print_at_exit):
        screen = Screen()
        console = JobConsole(screen, PLAIN)

        def read(console: JobConsole = console, end: "object" = end, screen: Screen = screen) -> Iterator[str]:
            yield from make_lines(0, ["held"])
            end(console)  # type: ignore[operator]
            assert screen.getvalue() == "main/0 [main0|n0.r0]:held\n"

        console.print_lines(read(), "main", 0, 8)


def test_a_bar_stays_below_merged_lines_and_is_not_merged() -> None:
    screen = Screen()
    console = JobConsole(screen, PLAIN)
    bar = "\r[main0|n0.r0]: 40%|####\n"
    console.print_lines([bar, *make_lines(0, ["step 1"]), *make_lines(0, ["step 1"], local=1)], "main", 0, 2)
    row, erased = "main/0 [main0|n0.r0]: 40%|####", "\r\x1b[K"
    assert screen.getvalue() == f"{row}{erased}main/0 [main0-1|n0.r0-1]:step 1\n{row}{erased}"


def test_the_last_row_says_how_the_job_is_doing_while_it_runs() -> None:
    screen = Screen()
    console = JobConsole(screen, PLAIN)
    console.follow_status(lambda: "step 3 of 9")
    console.follow_status(lambda: "another caller's")

    def read() -> Iterator[str]:
        screen.await_text("[muster] step 3 of 9")
        yield from make_lines(0, ["a line"])

    console.print_lines(read(), "main", 0)
    erased = "\r\x1b[K"
    assert screen.getvalue() == f"[muster] step 3 of 9{erased}main/0 [main0|n0.r0]:a line\n[muster] step 3 of 9{erased}"


@pytest.mark.parametrize("environ", [{"TERM": "dumb"}, {}])
def test_a_dumb_terminal_gets_merged_lines_and_no_sequences(environ: dict[str, str]) -> None:
    screen = Screen()
    lines = ["\r[main0|n0.r0]: 40%|####\n", *make_lines(0, ["step 1"]), *make_lines(0, ["step 2"], local=1)]
    console = JobConsole(screen, environ)
    console.follow_status(lambda: "step 3 of 9")
    console.print_lines(lines, "main", 0, 2)
    assert screen.getvalue() == "main/0 [main0-1|n0.r0-1]:step 1\n"


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        (["--nnodes", "2", "--nproc-per-node", "4"], 8),
        (["--nnodes", "1:2", "--nproc-per-node", "4"], 8),
        (["--nnodes", "1", "--nproc-per-node", "gpu"], 16),
        (["--nproc-per-node", "7"], 0),
        (["--nproc-per-node", "2", "--collapse-lines", "on"], 2),
        (["--nproc-per-node", "64", "--collapse-lines", "off"], 0),
    ],
)
def test_which_jobs_are_shown_merged(flags: list[str], ranks: int) -> None:
    assert count_merged_ranks(["-m", "muster.agent", *flags, "train.py"], gpus=16) == ranks


SAID = st.tuples(st.integers(0, 1), st.sampled_from(["step 1", "step 2", "x", "", "\x1b[1mbold\x1b[0m", "\udc80"]))


@given(st.lists(st.lists(SAID, max_size=8), min_size=1, max_size=3))
def test_every_line_is_there_once_for_each_rank(replicas: list[list[tuple[int, str]]]) -> None:
    lines = [
        [line for local, text in said for line in make_lines(node, [text], local, nodes=3)]
        for node, said in enumerate(replicas)
    ]
    shown = print_together(*lines, ranks=6)
    count = 0
    for line in shown:
        found = line.partition(" ")[2].partition("]:")[0].partition(".r")[2]
        count += len(parse_ranks(found))
    assert count == sum(map(len, lines))
