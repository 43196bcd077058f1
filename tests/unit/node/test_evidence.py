"""Stacks are asked for when something hangs, which may be the disk that they are written to."""

from types import SimpleNamespace

from doubles.clocks import HandClock
from doubles.samples import make_round

from muster._shared.records import replace
from muster.agent.node.actions import LocalFailure
from muster.agent.node.evidence import OTHERS_S, TEXTS_LIMIT_S, Evidence
from muster.agent.rendezvous.report_messages import StacksTaken
from muster.agent.workers.memory import MemoryWatch
from muster.agent.workers.spec import ProgramKind

ROUND = make_round(1, number=3)


class Thread:
    """The thread for files; while the disk hangs it does nothing."""

    def __init__(self) -> None:
        self.polls = []
        self.loop = SimpleNamespace(
            call_later=lambda _delay_s, call: self.polls.append(call), clock=SimpleNamespace(now_s=lambda: 0.0)
        )
        self.submitted = []
        self.submit = self.submitted.append

    def collect(self):
        """The disk works: do what was submitted."""
        for call in self.submitted:
            call()
        for poll in self.polls:
            poll()

    def reply(self, call):
        call()


class Node:
    """One node of a job whose single worker hangs, and the parts of it that `Evidence` reads."""

    def __init__(self, early_exits=()) -> None:
        self.timers = []
        self.reported = []
        self.thread = Thread()
        clock = SimpleNamespace(now_s=lambda: 100.0)
        loop = SimpleNamespace(clock=clock, call_later=self.call_later)
        logs = SimpleNamespace(files=SimpleNamespace(thread=self.thread))
        self.live = [SimpleNamespace(local_rank=0, pid=-1)]
        streams = {0: SimpleNamespace(stack_file="/hangs")}
        self.workers = SimpleNamespace(
            memory=MemoryWatch(),
            live=self.live,
            early_exits=early_exits,
            streams=streams,
            parts=SimpleNamespace(
                is_idle=False,
                read_views=lambda _round, _host, then: then({}),
                read_progress=lambda _round, _host, then: then({}),
            ),
        )
        config = SimpleNamespace(node_name="host", program=SimpleNamespace(kind=ProgramKind.SCRIPT))
        self.evidence = evidence = Evidence(config, loop, logs, self.workers)
        rendezvous = SimpleNamespace(send=self.reported.append)
        evidence.send_stacks(ROUND, 5, rendezvous)

    def call_later(self, delay_s, call):
        timer = SimpleNamespace(delay_s=delay_s, call=call, is_cancelled=False)
        timer.cancel = lambda: setattr(timer, "is_cancelled", True)
        self.timers.append(timer)
        return timer


def test_a_disk_that_hangs_does_not_keep_the_leader_waiting():
    node = Node()
    assert node.reported == []
    [timer] = node.timers
    assert timer.delay_s == TEXTS_LIMIT_S
    timer.call()
    assert node.reported == [StacksTaken(round_number=3, number=5, stacks=(), missing=1)]
    node.thread.collect()
    assert len(node.reported) == 1, "the disk answers late"


def test_a_hang_of_several_nodes_is_read_on_all_of_them_before_a_worker_is_stopped():
    """The first worker that ends breaks the connections to those of other nodes, which may not be read yet."""
    for nodes, waits in ((2, [OTHERS_S]), (1, [])):
        node = Node()
        node.workers.parts.is_idle = True
        del node.timers[:]
        done = []
        node.evidence.collect_stacks(replace(ROUND, group_world_size=nodes), done.append)
        limit = node.timers[0]
        limit.call()
        assert [timer.delay_s for timer in node.timers[1:]] == waits
        assert len(done) == (0 if waits else 1)
        for timer in node.timers[1:]:
            timer.call()
        assert done == [{}]


def test_the_leader_says_that_the_job_hangs_to_nodes_that_work():
    """The rank that keeps the others waiting may be busy here."""
    node = Node()
    node.workers.parts.is_idle = False
    for is_hang in (True, False):
        read = []
        node.workers.parts.read_views = lambda *_args, read=read: read.append("views")
        node.evidence.collect_stacks(ROUND, lambda stacks: None, is_hang=is_hang)
        assert read == (["views"] if is_hang else [])


def test_stacks_in_time_end_the_wait():
    node = Node()
    node.thread.collect()
    assert len(node.reported) == 1
    assert node.timers[0].is_cancelled


def test_workers_that_have_ended_by_themselves_are_reported_with_the_stacks():
    """The others may wait for them."""
    node = Node(early_exits=(1,))
    node.timers[0].call()
    [taken] = node.reported
    assert taken.missing == 1
    assert [(stack.global_rank, stack.text, stack.view.state, stack.view.host) for stack in taken.stacks] == [
        (1, "", "X", "host")
    ]


def test_a_failure_whose_files_hang_is_built_once():
    """What reads them goes on when the disk answers, and then shares nothing with the reports of other failures."""
    node, held, read = Node(), [], []
    node.workers.page, node.workers.ends = None, {}
    node.workers.streams = {}
    evidence = node.evidence
    evidence._logs = SimpleNamespace(
        files=SimpleNamespace(call=held.append),
        read_stderr_text=lambda _rank: "",
        read_stderr_tail=lambda _rank: ("no space left",),
        print_line=lambda _line: None,
    )
    evidence._builder._clock = HandClock()
    evidence._builder._add_class = lambda failure, *_: read.append(failure) or failure
    [failure] = evidence.collect_failures(ROUND, (LocalFailure(local_rank=0, reason="it failed"),))
    assert (failure.reason, failure.stderr_tail) == ("it failed", ("no space left",))
    for each in held:
        each()
    assert len(read) == 1
