"""`muster.worker` and the agent's side of the status page, in one process: what one writes the other reads."""

import errno
import importlib
import os
import random
import struct
import sys
import zlib

import pytest
from doubles.drain_commands import get_drain

from muster import worker
from muster._shared.contract import Env
from muster._shared.layouts import StatusPageLayout as Layout
from muster.agent.workers.status_page import ReportedStatus, StatusPage

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory files, which only Linux has")


@pytest.fixture
def page():
    page = StatusPage(nproc=2, round_number=7, attempt=1)
    yield page
    page.close()


@pytest.fixture
def managed(page, monkeypatch):
    """`muster.worker` as the worker of local rank 1 has it."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for name, value in page.build_env(1).items():
        monkeypatch.setenv(name, value)
    yield importlib.reload(worker)
    importlib.reload(worker)


@pytest.fixture
def agent_acts(managed, monkeypatch):
    """What the agent does while the worker waits: one call per turn of its wait; the test fails if it waits on."""
    turns = []

    def sleep(_seconds):
        assert turns, "the worker waits and nothing will end that"
        turns.pop(0)()

    monkeypatch.setattr(managed.time, "sleep", sleep)
    return turns


def command(kind, step, *, committed=False, drain=1):
    return Layout.pack_command(drain=drain, kind=kind, step=step, is_committed=committed)


def test_what_a_worker_reports_is_read(page, managed):
    managed.step(0, total=100, loss=0.5, lr=1)
    managed.step(12, loss=0.25)
    status = page.read_slot(1)
    assert (status.owner_pid, status.step, status.total, status.phase) == (os.getpid(), 12, 100, "")
    assert status.changed_ns is not None
    assert page.read_values(1) == {"loss": 0.25, "lr": 1.0}
    assert page.read_slot(0).owner_pid is None
    assert page.read_slot(0).step is None


def test_phases_nest(page, managed):
    with managed.phase("eval"):
        assert page.read_slot(1).phase == "eval"
        with managed.phase("checkpoint"):
            assert page.read_slot(1).phase == "checkpoint"
        assert page.read_slot(1).phase == "eval"
    assert page.read_slot(1).phase == ""


def test_names_beyond_the_table_disturb_nothing(page, managed, capfd):
    managed.step(1, **{f"value{number}": number for number in range(20)})
    assert page.read_values(1) == {f"value{number}": float(number) for number in range(8)}
    assert capfd.readouterr().err.count("\n") == 1
    for number in range(20):
        with managed.phase(f"phase{number}"):
            assert page.read_slot(1).phase == (f"phase{number}" if number < 8 else "")
    assert page.read_slot(1).step == 1


def test_long_names_are_cut_and_long_paths_refused(page, managed):
    managed.step(1, **{"ä" * 100: 3.0})
    assert list(page.read_values(1).values()) == [3.0]
    managed.saved(5, "/" + "p" * (Layout.PATH_BYTES - 1))
    assert page.read_saved(1) == (5, "/" + "p" * (Layout.PATH_BYTES - 1))
    with pytest.raises(ValueError, match="2537 bytes, at most 2536"):
        managed.saved(6, "p" * 2537)
    with pytest.raises(ValueError, match="is not UTF-8"):
        managed.saved(6, b"a\xff")
    for path in ("/a\0b", "/a\n[muster] rank 0 failed", "/a\x1b[2J", "/a\x85b", "/a\u202eb", "/a\tb"):
        with pytest.raises(ValueError, match="has control characters"):
            managed.saved(6, path)
    assert page.read_saved(1) == (5, "/" + "p" * (Layout.PATH_BYTES - 1)), "nothing was written"
    assert page.read_slot(1).saved_step == 5


def test_a_text_half_written_is_no_text(page, managed):
    managed.saved(5, "/checkpoints/step5")
    slot = managed._state.slot  # the memory itself
    slot.bytes[8 * (Layout.SAVED_PATH + 1)] ^= 1
    assert page.read_saved(1) is None


def test_step_and_path_are_of_one_checkpoint(page, managed):
    assert page.read_saved(1) is None
    managed.saved(5, "/five")
    assert page.read_saved(1) == (5, "/five")
    slot = managed._state.slot
    slot.write_text(Layout.SAVED_PATH, (7).to_bytes(8, sys.byteorder) + b"/six")  # stopped in the middle of saved(6)
    assert page.read_saved(1) is None
    slot.words[Layout.SAVED] = 7
    assert page.read_saved(1) == (6, "/six")
    managed.saved(7)
    assert page.read_saved(1) == (7, "")


def test_a_nodes_checkpoint_is_one_that_all_its_ranks_have_saved(page, managed):
    def save_as_rank_0(step, path=""):
        start = Layout.WORDS
        text = (step + 1).to_bytes(8, sys.byteorder) + path.encode()
        at = 8 * (start + Layout.SAVED_PATH + 1)
        page._memory[at : at + len(text)] = text
        page._words[start + Layout.SAVED_PATH] = len(text) << 32 | zlib.crc32(text)
        page._words[start + Layout.SAVED] = step + 1

    managed.saved(5, "/of rank 1")
    assert page.read_checkpoint() is None
    save_as_rank_0(4, "/four")
    assert page.read_checkpoint() is None
    save_as_rank_0(5)
    assert page.read_checkpoint() == (5, "/of rank 1")
    save_as_rank_0(5, "/of rank 0")
    assert page.read_checkpoint() == (5, "/of rank 0")


def test_the_agent_reads_any_bytes_without_an_error(page, managed):
    managed.step(1)
    slot = managed._state.slot
    chance = random.Random(5)
    for _ in range(300):
        slot.bytes[:] = chance.randbytes(Layout.BLOCK_BYTES)
        page.read_slot(1)
        page.read_values(1)
        page.read_saved(1)
        page.read_checkpoint()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: w.step(1.5), "the step must be an int, not float"),
        (lambda w: w.step(True), "the step must be an int, not bool"),
        (lambda w: w.step(1, loss="x"), r"step\(loss=\.\.\.\) takes a number, not str"),
        (lambda w: w.should_stop(None), "the step must be an int, not NoneType"),
    ],
)
def test_what_is_no_number_is_refused(managed, call, message):
    with pytest.raises(TypeError, match=message):
        call(managed)


def test_a_tensor_is_refused_because_reading_it_waits_for_the_device(managed):
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"not Tensor: .* pass \.item\(\)"):
        managed.step(1, loss=torch.tensor(0.5))
    with pytest.raises(TypeError, match="int, not Tensor"):
        managed.step(torch.tensor(3))


def test_integers_of_other_kinds_are_taken(page, managed):
    numpy = pytest.importorskip("numpy")
    managed.step(numpy.int64(4), total=numpy.int32(9), loss=numpy.float32(0.5))
    assert (page.read_slot(1).step, page.read_slot(1).total, page.read_values(1)) == (4, 9, {"loss": 0.5})
    assert managed.should_stop(numpy.int64(4)) is False
    assert page.read_slot(1).asked[Layout.STOP] == 4


# -- agreeing on a step -----------------------------------------------------------------------------------------------


def test_without_a_drain_nothing_stops_and_nothing_waits(page, managed, agent_acts):
    assert [managed.should_stop(i) for i in (0, 10, 20)] == [False] * 3
    assert [managed.should_checkpoint(i) for i in (3, 4)] == [False] * 2
    status = page.read_slot(1)
    assert status.asked == (20, 4, None, None)
    assert status.stride == (10, 1, 0, 0)


def test_below_the_ceiling_a_rank_goes_on_and_at_it_waits_for_the_commit(page, managed, agent_acts):
    page.write_command(command(Layout.STOP, 5))
    assert managed.should_stop(4) is False
    agent_acts += [lambda: None, lambda: page.write_command(command(Layout.STOP, 7, committed=True))]
    assert managed.should_stop(5) is False
    assert agent_acts == []
    assert managed.should_stop(6) is False
    assert managed.should_stop(7) is True
    assert managed.should_stop(7) is True


@pytest.mark.parametrize(("word", "step"), [(command(Layout.STOP, 6), 5), (0, 9)], ids=["raised", "withdrawn"])
def test_a_raised_ceiling_or_a_withdrawn_drain_lets_a_waiting_rank_go_on(page, managed, agent_acts, word, step):
    page.write_command(command(Layout.STOP, 5))
    agent_acts += [lambda: page.write_command(word)]
    assert managed.should_stop(step) is False


def test_the_step_is_published_before_the_command_is_read(page, managed, agent_acts):
    page.write_command(command(Layout.STOP, 5))
    seen = []
    agent_acts += [lambda: seen.append(page.read_slot(1).asked[Layout.STOP]), lambda: page.write_command(0)]
    managed.should_stop(8)
    assert seen == [8]


def test_a_drain_of_another_kind_is_not_this_questions(page, managed, agent_acts):
    page.write_command(command(Layout.CHECKPOINT, 5))
    assert managed.should_stop(9) is False
    agent_acts += [lambda: page.write_command(command(Layout.CHECKPOINT, 9, committed=True))]
    assert managed.should_checkpoint(9) is True
    assert managed.should_stop(9) is False


def test_falling_steps_make_a_rank_one_that_does_not_ask(page, managed, agent_acts, capfd):
    managed.should_stop(10)
    assert managed.should_stop(3) is False
    assert page.read_slot(1).is_asking == (False, True, True, True)
    assert "step 3 after step 10" in capfd.readouterr().err
    page.write_command(command(Layout.STOP, 0, committed=True))
    assert managed.should_stop(4) is False
    assert capfd.readouterr().err == ""


def test_a_pause_lasts_until_it_is_withdrawn(page, managed, agent_acts):
    managed.wait_while_paused()
    managed.step(6)
    page.write_command(command(Layout.PAUSE, 6, committed=True))
    agent_acts += [lambda: None, lambda: None, lambda: page.write_command(0)]
    managed.wait_while_paused()
    assert agent_acts == []


def test_for_a_join_a_rank_waits_once_its_snapshot_is_complete(page, managed, agent_acts):
    seen = []
    page.write_command(command(Layout.JOIN, 6, committed=True))
    agent_acts += [lambda: seen.append(page.read_waiting(1)), lambda: page.write_command(0)]
    managed.wait_for_join(6, [True, False].pop)
    assert [*seen, page.read_waiting(1)] == [None, 6]


@pytest.mark.parametrize("kind", [Layout.STOP, Layout.CHECKPOINT, Layout.PAUSE, Layout.JOIN])
@pytest.mark.parametrize("committed", [False, True])
def test_a_signal_ends_each_wait_but_not_a_step_that_ranks_save_at(page, kind, committed):
    page.write_command(command(kind, 6, committed=committed))
    page.withdraw_wait()
    assert (page._words[Layout.COMMAND] != 0) == (committed and kind in (Layout.STOP, Layout.CHECKPOINT))


def test_the_deadline_counts_down(page, managed, monkeypatch):
    assert managed.deadline_s() is None
    monkeypatch.setattr(managed.time, "monotonic_ns", lambda: 10_000_000_000)
    page.write_deadline(12_500_000_000)
    assert managed.deadline_s() == 2.5
    page.write_deadline(1)
    assert managed.deadline_s() == 0.0


# -- who speaks for the rank ------------------------------------------------------------------------------------------


def test_without_muster_every_call_does_nothing(monkeypatch):
    monkeypatch.delenv(Env.STATUS_PAGE, raising=False)
    monkeypatch.delenv(Env.RESUME_PATH, raising=False)
    fresh = importlib.reload(worker)
    fresh.step(1, total=5, loss=0.1)
    fresh.saved(1, "/x")
    fresh.wait_while_paused()
    with fresh.phase("eval"):
        pass
    assert (fresh.should_stop(1), fresh.should_checkpoint(1), fresh.is_managed()) == (False, False, False)
    assert (fresh.deadline_s(), fresh.resume_path()) == (None, None)


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("nothing", "not enough values"),
        ("/nonexistent/page:7:1", "No such file"),
        ("{page}:8:1", "another round"),
        ("{page}:7:2", "it has 2 slots"),
        ("/dev/null:7:1", "Invalid argument"),
    ],
)
def test_a_page_that_cannot_be_used_is_one_line(page, managed, monkeypatch, capfd, where, reason):
    path = page.build_env(1)[Env.STATUS_PAGE].rsplit(":", 2)[0]
    monkeypatch.setenv(Env.STATUS_PAGE, where.format(page=path))
    fresh = importlib.reload(worker)
    assert fresh.should_stop(3) is False
    assert fresh.is_managed() is False
    error = capfd.readouterr().err
    assert reason in error
    assert error.count("\n") == 1


def test_a_page_of_another_format_or_attempt_is_not_used(page, managed, monkeypatch, capfd):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert importlib.reload(worker).is_managed() is False
    assert "another round" in capfd.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    page._words[Layout.MAGIC_WORD] += 1
    assert importlib.reload(worker).is_managed() is False
    assert "has format 2, " in capfd.readouterr().err


def test_a_second_process_of_the_rank_stays_silent_while_the_first_lives(page, managed):
    page._words[Layout.WORDS * 2 + Layout.OWNER] = os.getppid()
    managed.step(5)
    assert managed.is_managed() is False
    assert page.read_slot(1).step is None


def test_the_next_process_of_the_rank_starts_with_an_empty_slot(page, managed, monkeypatch):
    managed.step(500, loss=3.0)
    managed.should_stop(500)
    monkeypatch.setattr(os, "getpid", lambda: 1 << 22)  # of the process before: it has ended
    page._words[Layout.WORDS * 2 + Layout.OWNER] = (1 << 22) + 1
    fresh = importlib.reload(worker)
    fresh.step(0)
    status = page.read_slot(1)
    assert (status.owner_pid, status.step, status.asked[Layout.STOP]) == (1 << 22, 0, None)
    assert page.read_values(1) == {}


def test_a_worker_cannot_cut_the_page(page):
    path = page.build_env(0)[Env.STATUS_PAGE].rsplit(":", 2)[0]
    with open(path, "r+b") as file, pytest.raises(OSError, match="not permitted"):
        file.truncate(0)


@pytest.mark.parametrize("call", ["memfd_create", "posix_fallocate"])
def test_without_memory_there_is_no_page_and_no_descriptor_is_left(monkeypatch, call):
    """Memory that is missing later would end the worker that touches it (SIGBUS)."""
    before = len(os.listdir("/proc/self/fd"))

    def is_full(*_arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, is_full)
    with pytest.raises(OSError, match="No space left"):
        StatusPage(nproc=2, round_number=1, attempt=0)
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_page_closes_once_and_frees_its_descriptor(page):
    before = len(os.listdir("/proc/self/fd"))
    extra = StatusPage(nproc=64, round_number=1, attempt=0)
    extra.close()
    extra.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_command_holds_what_belongs_together():
    for drain, kind, step in [(1, 0, 0), (Layout.MAX_DRAIN, 2, Layout.MAX_STEP), (77, 1, 123456789)]:
        for committed in (False, True):
            word = Layout.pack_command(drain=drain, kind=kind, step=step, is_committed=committed)
            assert struct.unpack("@q", struct.pack("@q", word)) == (word,)
            assert word > 0
            assert (get_drain(word), Layout.get_kind(word), Layout.get_step(word)) == (drain, kind, step)
            assert Layout.is_committed(word) is committed
    for drain, kind, step in [
        (0, 0, 0),
        (1, 4, 0),
        (1, 0, -1),
        (1, 0, Layout.MAX_STEP + 1),
        (Layout.MAX_DRAIN + 1, 0, 0),
    ]:
        with pytest.raises(ValueError, match="can hold"):
            Layout.pack_command(drain=drain, kind=kind, step=step, is_committed=False)


class TestAskOnce:
    """As processes that come one after the other: each maps the slot anew."""

    @pytest.fixture
    def ask(self, managed):
        return lambda *question: importlib.reload(managed).ask_once(*question)

    @pytest.mark.parametrize(
        ("questions", "stride"), [([(4,)], 0), ([(4,), (6,)], 2), ([(4, 3)], 3)], ids=["first", "second", "said"]
    )
    def test_what_is_asked_outlives_the_process_that_asked(self, page, ask, questions, stride):
        assert not any(ask(*each) for each in questions)
        assert (page.read_slot(1).asked[0], page.read_slot(1).stride[0]) == (questions[-1][0], stride)
        assert page.read_slot(1).owner_pid is None

    def test_the_agreed_step_stops_it(self, page, ask):
        page.write_command(command(Layout.STOP, 6, committed=True))
        assert not ask(5)
        assert ask(6)

    def test_it_says_nothing_for_a_rank_that_speaks_itself(self, page, ask, capfd):
        page._words[Layout.WORDS + Layout.WORDS + Layout.OWNER] = 1  # lives as long as this test
        assert not ask(5)
        assert page.read_slot(1).asked[0] is None
        assert "process 1 speaks for" in capfd.readouterr().err


def write_optimizer_steps(page: StatusPage, local_rank: int, steps: int) -> None:
    page._words[(local_rank + 1) * Layout.WORDS + Layout.OPTIMIZER_STEPS] = steps


def test_between_what_a_trainer_tells_the_optimizers_count_on(page: StatusPage) -> None:
    """It has continued at step 100, and says so every 5 s only; the other ranks' Trainers say nothing."""
    write_optimizer_steps(page, 0, 3)
    page.record_reported(0, ReportedStatus(total=200))
    assert page.read_shown(0).step is None, "after a resume the count would be wrong"
    page.record_reported(0, ReportedStatus(step=103, total=200, values={"loss": 0.5}))
    write_optimizer_steps(page, 0, 5)
    write_optimizer_steps(page, 1, 4)
    assert [page.read_shown(rank)[1:3] for rank in (0, 1)] == [(105, 200), (104, 200)]
    assert page.read_values(0) == {"loss": 0.5}
    assert page.read_slot(0).step is None, "nothing is decided on it"
    page.record_reported(0, ReportedStatus(values={"loss": 0.25}))  # its last one names no step
    assert (page.read_shown(0).step, page.read_values(0)) == (105, {"loss": 0.25})
    write_optimizer_steps(page, 0, 1000)
    assert page.read_shown(0).step == 200


def test_what_a_script_reports_itself_goes_before_what_a_trainer_tells(page: StatusPage) -> None:
    page.record_reported(0, ReportedStatus(step=103, total=200))
    page._words[Layout.WORDS + Layout.STEP] = 8
    assert (page.read_shown(0).step, page.read_shown(0).total) == (7, None)
