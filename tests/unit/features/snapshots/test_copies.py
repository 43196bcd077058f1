"""Parts of snapshots between two nodes, over a socket of this process: what arrives, what is refused, what is kept."""

import errno
import os
import random
import socket
import threading
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest

from muster._shared.layouts import SnapshotBlock as Block
from muster._shared.layouts import SnapshotHeader as Header
from muster._shared.snapshot_file import COMPLETE, SLOT_SPACE, NotKeptError, RemoteReader, Slot
from muster.agent.features.snapshots import exchange, fetching, ranges, transfer
from muster.agent.features.snapshots.exchange import Exchange
from muster.agent.features.snapshots.memory import SnapshotFiles, SnapshotMemory, SnapshotRound
from muster.agent.features.snapshots.messages import Generation, Source
from muster.agent.features.snapshots.ranges import RangeServer
from muster.agent.features.snapshots.transfer import BLOCK_BYTES
from muster.agent.rendezvous.protocol.framing import ProtocolError
from muster.agent.rendezvous.protocol.handshake import Codec
from muster.agent.rendezvous.transport.stream import TcpStream
from muster.agent.round import find_lineage
from muster.agent.runtime.loop import Loop, start_thread

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory files, which only Linux has")
LINEAGE = find_lineage(1, "leader")
NEIGHBOUR = Source(host="10.0.0.2", port=1, group_rank=1)


def open_codecs(token="t" * 40, other=None):
    """Two ends that have proved the token."""
    to_server, to_client = bytearray(), bytearray()
    client = Codec(token, is_server=False, write=to_server.extend)
    server = Codec(other or token, is_server=True, write=to_client.extend)
    client.start()
    while to_server or to_client:
        data, to_server[:] = bytes(to_server), b""
        list(server.receive(data))
        data, to_client[:] = bytes(to_client), b""
        list(client.receive(data))
    assert client.open
    assert server.open
    return client, server


def open_streams():
    ends = socket.socketpair()
    return tuple(TcpStream(sock, codec) for sock, codec in zip(ends, open_codecs(), strict=True))


class NowLoop:
    """Calls at once: the tests wait for the threads."""

    call_in_thread = Loop.call_in_thread

    def __init__(self):
        self.calls = []
        self.timers = []

    def call_later(self, delay_s, callback):
        self.timers.append((delay_s, callback))
        return SimpleNamespace(cancel=lambda: None)

    def call_from_thread(self, callback):
        self.calls.append(callback)

    def run(self):
        while self.calls:
            self.calls.pop(0)()


class Node:
    """One node of two, with its memory; connects to `peer`."""

    def __init__(self, group_rank, nproc=2):
        self.files = SnapshotFiles(nproc=nproc, share=1000, limit_bytes=0, copies=1)
        self.memory = SnapshotMemory(self.files)
        self.loop = NowLoop()
        self.exchange = Exchange(self.loop, self.memory, self.open_stream, self.seek)
        self.group_rank = group_rank
        self.peer = None
        self.lines = []
        self.knows_holder = True
        self.begin_round(None)

    def begin_round(self, base, number=1):
        lineage, rank = find_lineage(number, "leader"), self.group_rank
        formed = SnapshotRound(
            number=number, lineage=lineage, group_rank=rank, group_world_size=2, sends_copies=False, snapshot=base
        )
        self.memory.begin_round(formed)
        self.exchange.begin_round(formed)

    def save(self, step, states):
        for rank, state in enumerate(states):
            slot = self.memory.control.begin_save(rank)
            os.pwrite(self.memory.get_fd(rank), state, slot * SLOT_SPACE)
            global_rank = 2 * self.group_rank + rank
            saved = Slot(COMPLETE, self.memory.control.lineage, step, len(state), global_rank, 4, False)
            self.memory.control.end_save(rank, slot, saved)
        self.memory.control.words[Header.USED] = 1

    def read(self, step):
        part = self.memory.find_part((LINEAGE, step))
        return [os.pread(extent.fd, extent.length, extent.offset) for extent in part.extents]

    def open_stream(self, _source, on_open, on_failed):
        mine, theirs = open_streams()
        self.stream = mine
        self.peer.exchange.serve(theirs)
        on_open(mine)

    def seek(self, rank, give):
        give(Source(host="10.0.0.2", port=1, group_rank=rank // 2) if self.knows_holder else None)

    def wait(self, begin):
        """Begin a transfer and wait for its end: why it failed, or None."""
        ended, problems = threading.Event(), []
        append = self.loop.calls.append

        def call_from_thread(callback):
            append(callback)
            self.loop.run()

        self.loop.call_from_thread = call_from_thread

        def end(problem):
            problems.append(problem)
            ended.set()

        begin(end)
        assert ended.wait(30)
        return problems[0]

    def fetch(self, step, group_rank=0):
        """Get a part; why it failed, or None, and whether it does not fit."""
        generation = Generation(lineage=LINEAGE, step=step, size=2)
        source = Source(host="10.0.0.2", port=1, group_rank=group_rank)
        found = []

        def begin(end):
            def on_end(problem, does_not_fit):
                found.append(does_not_fit)
                end(problem)

            self.exchange.fetch(generation, source, on_end, self.lines.append)

        return self.wait(begin), found[0]

    def close(self):
        self.exchange.close()
        self.files.close()


@pytest.fixture
def nodes():
    pair = Node(0), Node(1)
    pair[0].peer, pair[1].peer = pair[1], pair[0]
    yield pair
    for node in pair:
        node.close()


def make_states(seed, *sizes):
    draw = random.Random(seed)
    return [draw.randbytes(size) for size in sizes]


def send(node, step):
    return node.wait(lambda end: node.exchange.send((LINEAGE, step), NEIGHBOUR, end))


def give(node, step, *sizes):
    """Save a step, and send it to the neighbour; what was saved."""
    node.save(step, states := make_states(step, *sizes))
    assert send(node, step) is None
    return states


def list_copied(node):
    return [each.generation.step for each in node.exchange.copies.list_holdings()]


def read_copy(node, step):
    part = node.exchange.copies.find((LINEAGE, step), 0)
    return [os.pread(extent.fd, extent.length, extent.offset) for extent in part.extents]


@contextmanager
def open_reader(node):
    """What a worker of this node reads of other ranks."""
    with closing(RangeServer(node.memory, node.exchange.read_range)):
        reader = RemoteReader(node.memory.control)
        with closing(reader):
            reader._socket.settimeout(30)
            yield reader


def test_what_a_neighbour_has_got_is_what_was_saved(nodes):
    one, other = nodes
    states = give(one, 7, 3 * BLOCK_BYTES + 5, 1)
    assert read_copy(other, 7) == states
    [holding] = other.exchange.copies.list_holdings()
    assert (holding.group_rank, holding.first_rank, holding.nproc, holding.is_copy) == (0, 0, 2, True)
    assert holding.generation == Generation(lineage=LINEAGE, step=7, size=2)
    assert send(one, 7) is None, "it has it already"


def test_a_node_that_takes_over_gets_its_part_back(nodes):
    one, other = nodes
    states = give(one, 7, BLOCK_BYTES, 70)
    fresh = Node(0)
    fresh.peer = other
    generation = Generation(lineage=LINEAGE, step=7, size=2)
    assert fresh.fetch(7) == (None, False)
    assert fresh.read(7) == states
    [holding] = fresh.memory.list_holdings()
    assert (holding.generation, holding.group_rank, holding.is_copy) == (generation, 0, False)
    fresh.close()
    assert "not have it" in one.fetch(8)[0]


def test_a_node_takes_from_itself_what_it_keeps_for_another(nodes):
    one, other = nodes
    states = give(one, 7, 400_000, 70)
    assert other.fetch(7) == (None, False)
    assert other.read(7) == states


def test_nodes_that_need_each_others_parts_both_get_them(nodes):
    """What a node gives up can be read until its workers save over it."""
    states = [make_states(number, 400_000, 70) for number in range(2)]
    for node, own in zip(nodes, states, strict=True):
        node.save(7, own)
    one, other = nodes
    assert one.fetch(7, 1) == other.fetch(7, 0) == (None, False)
    assert [one.read(7), other.read(7)] == states[::-1]
    assert [(each.group_rank, each.is_copy) for each in one.memory.list_holdings()] == [(1, False), (0, True)]
    assert one.memory.find_extent((LINEAGE, 7), 1).length == 70
    one.save(8, states[0])
    assert [each.group_rank for each in one.memory.list_holdings() if each.generation.step == 7] == [1]


def test_a_fetch_that_finds_no_memory_ends_too(nodes, monkeypatch):
    """The next round waits for its end."""
    one, other = nodes
    give(one, 7, 400_000, 70)

    def fail(*_args):
        raise MemoryError

    monkeypatch.setattr(fetching.Fetch, "copy", fail)
    assert other.fetch(7) == ("MemoryError", False)


@pytest.mark.parametrize("is_copy", [False, True])
def test_a_part_beyond_the_limit_is_not_fetched(nodes, is_copy):
    """Neither from the node that has it, nor from the copy here: its workers read it as ranges."""
    one, other = nodes
    states = make_states(8, 1001, 10)
    one.save(1, states)
    if is_copy:
        assert send(one, 1) is None
    other.memory.control.words[Header.LIMIT] = 2 * 5 * 1000
    problem, does_not_fit = other.fetch(1)
    assert "1001 bytes is more" in problem
    assert does_not_fit
    assert other.memory.list_holdings() == ()
    other.memory.control.words[Header.LIMIT] = 2 * 5 * 1001
    assert other.fetch(1) == (None, False)


def give_up_at(node, moment):
    """A fetch of 4 blocks of this node is cancelled at a moment; why it failed."""
    blocks = []
    count = fetching.Fetch._count

    def cancel_at(self, length):
        blocks.append(length)
        if len(blocks) == moment:
            self.cancel("its round is over")
        count(self, length)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetching.Fetch, "_count", cancel_at)
        problem, _ = node.fetch(1)
    return problem, len(blocks)


@pytest.mark.parametrize("is_copy", [False, True])
def test_a_fetch_ends_at_the_next_block_when_its_round_is_over(nodes, is_copy, monkeypatch):
    monkeypatch.setattr(fetching, "_COPY_BYTES", BLOCK_BYTES)
    one, other = nodes
    one.save(1, make_states(8, 6 * BLOCK_BYTES, 10))
    if is_copy:
        assert send(one, 1) is None
    assert give_up_at(other, 2)[1] == 2
    assert other.memory.list_holdings() == ()
    assert other.fetch(1) == (None, False)


def test_a_fetch_that_is_cancelled_before_its_connection_is_open_reads_nothing(nodes):
    one, other = nodes
    one.save(1, make_states(8, 100, 10))
    open_stream = other.open_stream

    def open_late(source, on_open, on_failed):
        other.exchange.fetching.cancel("its round is over")
        open_stream(source, on_open, on_failed)

    other.exchange._open_stream = open_late
    problem, is_here = other.fetch(1)
    assert ("round is over" in problem, is_here) == (True, False)
    assert other.exchange.fetching is None
    assert other.memory.list_holdings() == ()


def test_a_fetch_has_one_limit_for_all_of_it_and_tells_how_far_it_is(nodes):
    """Whatever trickles in: each operation may stay below its own limit."""
    one, other = nodes
    one.save(1, make_states(8, 5 * BLOCK_BYTES, 10))
    count = fetching.Fetch._count

    def let_time_pass(self, length):
        count(self, length)
        if self._received == 2 * BLOCK_BYTES:
            for delay_s, callback in list(other.loop.timers):
                assert delay_s in (fetching.TELL_S, fetching.LIMIT_S)
                callback()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetching.Fetch, "_count", let_time_pass)
        problem, is_here = other.fetch(1)
    assert ("longer than 600 s" in problem, is_here) == (True, False)
    assert ["snapshot of step 1" in each for each in other.lines] == [True]


def test_a_connection_that_opens_too_late_for_a_worker_is_closed(nodes, monkeypatch):
    one, other = nodes
    other.save(7, make_states(1, 100, 10))
    for node in nodes:
        node.begin_round(Generation(lineage=LINEAGE, step=7, size=2), number=2)
    monkeypatch.setattr(exchange, "SEEK_LIMIT_S", 0.01)
    asked = threading.Event()
    waiting = []
    one.loop.call_from_thread = lambda callback: callback()
    one.exchange._open_stream = lambda _source, on_open, _on_failed: (waiting.append(on_open), asked.set())
    with pytest.raises(transfer.TransferError, match=r"10\.0\.0\.2 cannot be reached"):
        one.exchange.read_range((LINEAGE, 7), 2, 0, 0, lambda _: None, lambda _: None)
    assert asked.is_set()
    mine, theirs = open_streams()
    waiting[0](mine)
    assert mine._socket.fileno() == -1, "it is closed"
    theirs.close()


def test_only_blocks_that_have_changed_are_sent_again(nodes, monkeypatch):
    one, other = nodes
    sent = []
    send_raw = TcpStream.send_raw
    monkeypatch.setattr(TcpStream, "send_raw", lambda self, data: (sent.append(len(data)), send_raw(self, data)))
    states = give(one, 1, 4 * BLOCK_BYTES, 10)
    assert sent == [BLOCK_BYTES] * 4 + [10]
    sent.clear()
    changed = [states[0][:BLOCK_BYTES] + b"x" + states[0][BLOCK_BYTES + 1 :], states[1]]
    one.save(2, changed)
    assert send(one, 2) is None
    assert sent == [BLOCK_BYTES]
    assert read_copy(other, 2) == changed
    one.save(3, states)
    assert send(one, 3) is None
    assert list_copied(other) == [2, 3]


@pytest.mark.parametrize("block", range(1, 5))
@pytest.mark.parametrize("saves", [1, 2, 3])
def test_a_slot_that_is_written_to_while_any_block_of_it_is_sent_is_no_copy(nodes, monkeypatch, block, saves):
    """Whatever lets the worker do so: the last whole copy stays. As long as it writes elsewhere, the copy is whole."""
    one, other = nodes
    give(one, 1, 100, 100)
    one.save(2, states := make_states(6, 3 * BLOCK_BYTES, 100))
    send_message, blocks = TcpStream.send, []

    def overwrite(self, message):
        blocks.extend(name for name in message if name == "digest")
        if len(blocks) == block and "digest" in message:
            for step in range(3, 3 + saves):
                one.save(step, make_states(step, 3 * BLOCK_BYTES, 100))
        send_message(self, message)

    monkeypatch.setattr(TcpStream, "send", overwrite)
    problem = send(one, 2)
    copies = list_copied(other)
    if saves < 3:
        assert (problem, copies) == (None, [1, 2])
        assert read_copy(other, 2) == states
    else:
        assert "get it whole" in problem
        assert copies == [1]


def test_what_is_sent_when_the_agent_ends_closes_no_descriptor_of_something_else(nodes, monkeypatch):
    """Its thread ends after the memory files were closed: their numbers may be something else's."""
    one, _ = nodes
    one.save(7, make_states(1, 100, 100))

    class Stream:
        def send(self, message):
            if "digest" in message:
                one.files.close()

        def send_raw(self, data):
            pass

    content_fds, closed, close = [*one.files.content_fds], [], os.close
    monkeypatch.setattr(os, "close", lambda fd: (closed.append(fd), close(fd)))
    with pytest.raises(OSError, match="Bad file descriptor"):  # of the second rank
        one.exchange._send_part(Stream(), {"key": [LINEAGE, 7], "group_rank": 0})
    assert closed.count(content_fds[0]) == 1


def test_a_lost_nodes_part_of_the_base_stays_when_another_node_sends_its_own(nodes):
    """Of three nodes one is lost: the ranks of the other two read its part, and the neighbours are others."""
    lost, other = nodes
    give(lost, 7, 100, 10)
    left = Node(2)
    left.peer = other
    left.save(7, make_states(2, 100, 10))
    other.begin_round(Generation(lineage=LINEAGE, step=7, size=3), number=2)
    assert send(left, 7) is None
    assert [each.group_rank for each in other.exchange.copies.list_holdings()] == [0, 2]
    give(left, 8, 100, 10)
    assert [each.group_rank for each in other.exchange.copies.list_holdings()] == [2, 2]
    left.close()


def test_the_base_stays_known_however_many_rounds_save_nothing(nodes):
    one, _ = nodes
    one.save(7, make_states(1, 100, 10))
    for number in range(2, 40):
        one.begin_round(Generation(lineage=LINEAGE, step=7, size=2), number=number)
    assert [each.generation.key for each in one.memory.list_holdings()] == [(LINEAGE, 7)]


def test_ranges_are_served_again_after_descriptors_ran_out(nodes, monkeypatch):
    one, _ = nodes
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "too many open files")]

    def fail_once(self):
        if failures:
            raise failures.pop()
        return accept(self)

    one.save(7, make_states(1, 100, 10))
    one.begin_round(Generation(lineage=LINEAGE, step=7, size=2), number=2)
    monkeypatch.setattr(socket.socket, "accept", fail_once)
    with open_reader(one) as reader:
        assert reader.find_bytes(0) == 100
    assert not failures


def test_a_worker_for_which_no_thread_is_left_is_told_and_the_next_is_served(nodes, monkeypatch):
    one, _ = nodes
    failures = [RuntimeError("can't start new thread")]

    def start(run, name):
        if failures and name == "muster-range":
            raise failures.pop()
        return start_thread(run, name)

    one.save(7, make_states(1, 100, 10))
    one.begin_round(Generation(lineage=LINEAGE, step=7, size=2), number=2)
    monkeypatch.setattr(ranges, "start_thread", start)
    with open_reader(one) as reader:
        with pytest.raises(OSError, match=r"can be reached|reset|pipe"):
            reader.find_bytes(0)
        with closing(RemoteReader(one.memory.control)) as again:
            again._socket.settimeout(30)
            assert again.find_bytes(0) == 100


def test_a_changed_block_is_noticed(nodes, monkeypatch):
    one, other = nodes
    one.save(1, make_states(7, 1000, 1000))
    send_raw = TcpStream.send_raw

    def change(self, data):
        send_raw(self, memoryview(b"?" + bytes(data[1:])))

    monkeypatch.setattr(TcpStream, "send_raw", change)
    assert "block was changed" in send(one, 1)
    assert other.exchange.copies.list_holdings() == ()


def test_a_state_beyond_the_limit_is_refused(nodes):
    one, other = nodes
    other.memory.control.words[Header.LIMIT] = 2 * 5 * 1000
    one.save(1, make_states(8, 1001, 10))
    assert "1001 bytes is more" in send(one, 1)
    give(one, 2, 1000, 10)


def test_copies_that_the_next_round_does_not_descend_from_are_given_up(nodes):
    one, other = nodes
    give(one, 1, 10, 10)
    give(one, 2, 10, 10)
    other.begin_round(Generation(lineage=LINEAGE, step=1, size=2), number=2)
    assert list_copied(other) == [1]
    other.begin_round(None, number=3)
    assert other.exchange.copies.list_holdings() == ()


def test_a_pinned_slot_is_not_chosen(nodes):
    one, _ = nodes
    one.save(1, make_states(1, 10, 10))
    assert one.memory.pin((LINEAGE, 1))
    for step in range(2, 7):
        one.save(step, make_states(1, 10, 10))
    assert {slot.step for slot in one.memory.control.read_slots(0)} == {1, 5, 6}
    one.memory.unpin()
    one.save(7, make_states(1, 10, 10))
    assert {slot.step for slot in one.memory.control.read_slots(0)} == {5, 6, 7}
    assert not one.memory.pin((LINEAGE, 1))
    assert one.memory.control.read_block(0, Block.PIN) == 0


def test_a_dictionary_that_was_changed_is_refused():
    mine, theirs = open_streams()
    mine.send({"do": "get"})
    data = bytearray(theirs._socket.recv(1000))
    data[-2] ^= 1
    raw, end = socket.socketpair()
    raw.sendall(data)
    with pytest.raises(ProtocolError, match="changed in transit"):
        TcpStream(end, theirs._codec).receive()
    for each in (raw, end, mine, theirs):
        each.close()


def test_what_was_received_before_the_loop_let_go_is_not_lost():
    client, server = open_codecs()
    frame = client.seal(b'{"n": 1}') + client.seal(b'{"n": 2}') + client.seal(b'{"n": 3}')
    on_loop = server.receive(frame[:-5])
    assert next(on_loop) == {"n": 1}
    mine, theirs = socket.socketpair()
    mine.sendall(frame[-5:])
    stream = TcpStream(theirs, server)
    assert [stream.receive(), stream.receive()] == [{"n": 2}, {"n": 3}]
    mine.close()
    stream.close()


def test_workers_read_what_any_rank_has_saved_wherever_it_is(nodes):
    """Its own from this node's slots, a neighbour's from the copy, others' from their node, which the leader names."""
    one, other = nodes
    mine, theirs = make_states(10, 600_000, 900), make_states(11, 700_000, 800)
    one.save(7, mine)
    other.save(7, theirs)
    generation = Generation(lineage=LINEAGE, step=7, size=2)
    for node in nodes:
        node.begin_round(generation, number=2)
        node.loop.call_from_thread = lambda callback: callback()
    with open_reader(one) as reader:
        for rank, state in enumerate([*mine, *theirs]):
            assert reader.find_bytes(rank) == len(state)
            into = bytearray(500)
            reader.read(rank, len(state) - 700, memoryview(into))
            assert into == state[-700:-200]
        whole = bytearray(700_000)
        reader.read(2, 0, memoryview(whole))
        assert whole == theirs[0]
        with pytest.raises(OSError, match="600 to 1100 of rank 1"):
            reader.read(1, 600, memoryview(into))
        reader.find_bytes(1)
        one.knows_holder = False
        with pytest.raises(NotKeptError, match="what rank 3 has"):
            reader.find_bytes(3)
        assert send(other, 7) is None
        assert reader.find_bytes(3) == len(theirs[1]), "the neighbour's copy is here now"
