"""`--hang-timeout auto`: what is learned, and 200 seeded jobs over the whole watch, on the test's own clock."""

import random
from collections.abc import Callable, Iterator, Mapping

import pytest
from doubles.clocks import HandClock

from muster.agent.features.hangs.sessions import Reading
from muster.agent.features.hangs.watch import Activity, HangWatch, LearnedLimits, Limits
from muster.agent.runtime.loop import Loop

RANKS = 4
TIMEOUT_S = 600.0
"""Of the process group, NCCL's own."""
LOOK_S = 5.0


def test_what_is_not_known_has_wide_limits_below_nccls_own() -> None:
    limits = LearnedLimits()
    assert limits.find("") == Limits(quiet_s=480.0, busy_s=480.0)
    assert limits.find("eval") == Limits(quiet_s=480.0, busy_s=1800.0)
    assert "no step" in limits.describe("")


def test_steps_are_known_after_some_looks() -> None:
    limits = LearnedLimits()
    for _ in range(4):
        limits.record_active("", pause_s=20.0, quiet_s=2.0)
    assert limits.find("").quiet_s == 480.0
    limits.record_active("", pause_s=5.0, quiet_s=1.0)
    assert limits.find("") == Limits(quiet_s=60.0, busy_s=480.0)
    assert "before was 20 s" in limits.describe("")


def test_a_limit_is_five_times_the_longest_pause() -> None:
    limits = LearnedLimits()
    for _ in range(5):
        limits.record_active("", pause_s=200.0, quiet_s=30.0)
    assert limits.find("") == Limits(quiet_s=150.0, busy_s=1000.0)


def test_phases_are_learned_apart() -> None:
    limits = LearnedLimits()
    limits.record_active("save", pause_s=100.0, quiet_s=90.0)
    assert limits.find("save") == Limits(quiet_s=450.0, busy_s=1800.0)
    assert limits.find("").quiet_s == 480.0


class Job:
    """Workers of one node under the watch; a look every five seconds."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.loop = Loop(self.clock)
        self.collectives: list[int | None] = [None] * RANKS
        self.cpu_s = [0.0] * RANKS
        self.written = [0] * RANKS
        self.loaded = [0] * RANKS
        self.phase = ""
        self.waits_since: dict[int, float] = {}
        """When ranks entered the collective in which they wait."""
        self.reports: list[str] = []
        self.idle_s = 0.0
        """Of the worker that is idle for longest, as the watch said at its last look."""
        self.ended: set[int] = set()
        self.urgent_s: list[float] = []
        """When a report said that torch is about to end a worker."""
        self.still: list[float] = []
        """For how long the workers stood still, as was said."""
        self.watch = HangWatch(
            self.loop,
            limit_s=60.0,
            limits=LearnedLimits(),
            read=self.read,
            on_idle=self.note,
            on_still=self.still.append,
        )

    def note(self, text: str | None, is_urgent: bool) -> None:
        if text is not None:
            self.reports.append(text)
        if is_urgent:
            self.urgent_s.append(self.clock.at_s)

    def read(self, idle_s: float, _silent_s: float, then: Callable[[Mapping[int, Activity]], None]) -> None:
        self.idle_s = idle_s
        found = {}
        for rank in set(range(RANKS)) - self.ended:
            count = self.collectives[rank]
            reading = Reading(cpu_s=self.cpu_s[rank], written_bytes=self.written[rank], loaded_bytes=self.loaded[rank])
            found[rank] = Activity(
                captured_bytes=0,
                processes={(10 + rank, 1): reading},
                phase=self.phase,
                collectives=None if count is None else (count,),
                is_waiting=rank in self.waits_since,
                timeout_s=TIMEOUT_S if self.clock.at_s - self.waits_since.get(rank, self.clock.at_s) >= 570.0 else 0.0,
            )
        then(found)

    def pass_s(
        self,
        seconds: float,
        *,
        busy: tuple[int, ...] = (),
        writing: tuple[int, ...] = (),
        loading: tuple[int, ...] = (),
        waiting: tuple[int, ...] = (),
        step: bool = False,
    ) -> None:
        """Time passes; some ranks use the CPU or write, or have entered a collective and wait for the others.

        With `step`, all ranks complete a collective at its end.
        """
        for rank in waiting:
            self.waits_since.setdefault(rank, self.clock.at_s)
            self.collectives[rank] = (self.collectives[rank] or 0) + 1
        until_s = self.clock.at_s + seconds
        while self.clock.at_s < until_s:
            part_s = min(1.0, until_s - self.clock.at_s)
            for rank in busy:
                self.cpu_s[rank] += part_s
            for rank in writing:
                self.written[rank] += 1000
            for rank in loading:
                self.loaded[rank] += 1_000_000
            self.clock.at_s += part_s
            self.loop.turn(0.0)
        if step:
            self.collectives = [(count or 0) + 1 for count in self.collectives]
            self.waits_since = {}

    def close(self) -> None:
        self.watch.close()
        self.loop.close()


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.close()


EVERYONE = tuple(range(RANKS))
OTHERS = (0, 2, 3)


def play(job: Job, seed: int) -> None:
    """A start, a long first step, then steps with evaluations and checkpoints between them, some of them named."""
    draw = random.Random(seed)  # a schedule, no secret
    job.pass_s(draw.uniform(1, 400), busy=EVERYONE)
    job.pass_s(draw.uniform(1, 460), busy=EVERYONE, step=True)
    step_s = draw.choice([0.2, 1.0, 3.0, 11.0, 40.0])
    names = draw.random() < 0.5
    for _ in range(draw.randint(3, 6)):
        for _ in range(max(4, int(60 / step_s))):
            job.pass_s(step_s * draw.uniform(0.8, 1.3), busy=EVERYONE, step=True)
        kind = draw.choice(["eval", "rank 0", "checkpoint", "quiet"])
        job.phase = kind if names else ""
        if kind == "eval":
            job.pass_s(draw.uniform(5, 1700 if names else 460), busy=EVERYONE, step=True)
        elif kind == "rank 0":
            job.pass_s(draw.uniform(5, 560 if names else 460), busy=(0,), waiting=(1, 2, 3), step=True)
        elif kind == "checkpoint":
            job.pass_s(draw.uniform(5, 300), writing=EVERYONE, step=True)
        else:
            job.pass_s(draw.uniform(1, 50), step=True)
        job.phase = ""
        job.pass_s(LOOK_S, busy=EVERYONE, step=True)


@pytest.mark.parametrize("first", range(0, 50, 25))
def test_no_false_alarm_and_each_hang_is_found(first: int) -> None:
    """25 seeded jobs; each hangs at its end, with all ranks quiet or one in an endless loop, perhaps in a phase."""
    for seed in range(first, first + 25):
        job = Job()
        play(job, seed)
        assert job.reports == [], f"seed {seed}"
        assert job.still == [], f"seed {seed}"
        job.phase = "eval" if seed % 3 == 0 else ""
        job.pass_s(597.0, busy=(1,) if seed % 2 else (), waiting=OTHERS)
        assert job.reports, f"seed {seed}: torch's own timeout ends the job first"
        assert job.urgent_s, f"seed {seed}"
        job.close()


def test_an_early_hang_is_said_softly_long_before_it_counts_as_one(job: Job) -> None:
    """Within its first looks nothing is learned yet: it would be silent for 480 s."""
    for _ in range(2):
        job.pass_s(5.0, busy=EVERYONE, step=True)
    job.pass_s(60.0, waiting=OTHERS)
    assert (job.reports, len(job.still)) == ([], 1)
    job.pass_s(400.0)
    assert (job.reports, job.still) == ([], [50.0, 100.0, 200.0, 400.0])
    job.pass_s(50.0)
    assert job.reports
    before = len(job.still)
    job.pass_s(1.0, step=True)
    job.pass_s(10.0, busy=EVERYONE)
    assert job.still[before:] == [0.0]


@pytest.mark.parametrize("work", [{"busy": (1,)}, {"writing": (1,)}, {"loading": (1,)}])
def test_a_rank_that_works_does_not_stand_still(job: Job, work: dict[str, tuple[int, ...]]) -> None:
    """It compiles, saves, or loads its data from a disk; all others wait for it."""
    job.pass_s(5.0, busy=EVERYONE, step=True)
    job.pass_s(300.0, waiting=OTHERS, **work)
    assert job.still == []


def test_what_other_threads_of_a_rank_do_while_it_waits_is_no_work(job: Job) -> None:
    """They print that it waits."""
    job.pass_s(5.0, busy=EVERYONE, step=True)
    job.pass_s(60.0, waiting=EVERYONE, writing=EVERYONE)
    assert len(job.still) == 1


def test_a_job_that_often_stands_still_is_not_said_to_hang(job: Job) -> None:
    for _ in range(3):
        job.pass_s(30.0)
        job.pass_s(5.0, busy=EVERYONE, step=True)
    job.pass_s(100.0)
    assert job.still == []


def test_workers_that_hang_stand_still_for_a_stop_also_where_one_loops(job: Job) -> None:
    """Our own look at their stacks costs them CPU time, too."""
    for _ in range(100):
        job.pass_s(1.0, busy=EVERYONE, step=True)
    job.pass_s(470.0, busy=(1,), waiting=OTHERS)
    assert (job.reports, job.watch.still_s) == ([], 0.0)
    job.pass_s(20.0, busy=(1,))
    assert len(job.reports) == 1
    assert job.watch.still_s >= 480.0
    job.pass_s(6.0, busy=EVERYONE, step=True)
    job.pass_s(6.0, busy=EVERYONE, step=True)
    assert job.watch.still_s == 0.0


def test_a_quiet_hang_is_found_soon_and_what_was_learned_makes_the_soft_line_needless(job: Job) -> None:
    for _ in range(100):
        job.pass_s(1.0, busy=EVERYONE, step=True)
    job.pass_s(75.0)
    assert (len(job.reports), job.still) == (1, [])
    assert job.reports[0].endswith("before was 5 s)")
    assert "no step for 6" in job.reports[0]


def test_a_wait_is_found_before_torch_ends_it_whatever_limit_was_learned(job: Job) -> None:
    """Long pauses were seen, so that 1000 s would be no hang."""
    for _ in range(6):
        job.pass_s(200.0, busy=EVERYONE, step=True)
    job.pass_s(565.0, busy=(1,), waiting=OTHERS)
    assert job.reports == []
    job.pass_s(10.0, busy=(1,))
    assert ["torch" in each and " 600 s " in each for each in job.reports] == [True]
    job.pass_s(1.0, busy=EVERYONE, step=True)
    job.pass_s(60.0, busy=EVERYONE)
    assert len(job.reports) == len(job.urgent_s) == 1


def test_a_rank_that_works_while_an_operation_of_it_is_open_does_not_wait(job: Job) -> None:
    """Another thread of it waits for orders in a broadcast, say, for as long as the job lasts."""
    job.pass_s(1.0, busy=EVERYONE, step=True)
    job.waits_since = dict.fromkeys(EVERYONE, job.clock.at_s)
    for _ in range(20):
        job.pass_s(40.0, busy=EVERYONE)
        job.collectives = [(count or 0) + 1 for count in job.collectives]
    assert job.reports == []


def test_a_rank_that_prepares_data_before_its_first_collective_keeps_no_others_waiting_for_too_long(job: Job) -> None:
    """It shows a sign of life, by the CPU time that it uses, and torch would end the others all the same."""
    job.pass_s(565.0, busy=(1,), waiting=OTHERS)
    assert job.reports == []
    job.pass_s(10.0, busy=(1,))
    assert len(job.urgent_s) == 1
    job.pass_s(30.0, busy=(1,))
    assert len(job.urgent_s) == 1, "once"


def test_that_torch_is_about_to_end_a_worker_is_said_again_of_a_node_that_was_idle(job: Job) -> None:
    """The other nodes may not be idle: they were waited for."""
    for _ in range(100):
        job.pass_s(1.0, busy=EVERYONE, step=True)
    job.pass_s(75.0, waiting=OTHERS)
    assert (len(job.reports), job.urgent_s) == (1, [])
    job.pass_s(500.0)
    assert len(job.urgent_s) == 1
    assert "step for 56" in job.reports[-1]


def test_a_rank_that_has_ended_is_not_idle(job: Job) -> None:
    """NCCL's recorder of the others would be read for it."""
    job.pass_s(10.0, busy=EVERYONE, step=True)
    job.ended = {1}
    for _ in range(20):
        job.pass_s(10.0, busy=EVERYONE, step=True)
    assert job.idle_s <= 20.0
    job.pass_s(40.0)
    assert job.idle_s >= 30.0
