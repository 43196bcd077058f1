"""A signal while an object ends: Python drops what the handler raises, and the adapters do not."""

import io
import signal
import threading
from collections.abc import Iterator

import pytest

from muster.schedulers.interrupts import raise_dropped_interrupts


class Response(io.IOBase):
    """Ends as the HTTP clients' responses do: `closed` is Python code, and a signal arrives in it."""

    def __init__(self, signum: int) -> None:
        self._signum = signum

    @property
    def closed(self) -> bool:
        signal.raise_signal(self._signum)
        return True


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # CI may start tests with SIGINT ignored
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def test_a_ctrl_c_while_an_object_ends_is_raised() -> None:
    Response(signal.SIGINT)  # the interpreter drops it
    with pytest.raises(KeyboardInterrupt), raise_dropped_interrupts():
        Response(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_of_nested_blocks_the_inner_one_raises() -> None:
    passed = []

    def submit() -> None:
        with raise_dropped_interrupts():
            with raise_dropped_interrupts():
                Response(signal.SIGINT)
            passed.append("the inner block")

    with pytest.raises(KeyboardInterrupt):
        submit()
    assert not passed


def test_what_the_handler_of_another_signal_raises_is_kept_too() -> None:
    def end(signum: int, _frame: object) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, end)
    with pytest.raises(SystemExit), raise_dropped_interrupts():
        Response(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is end


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with raise_dropped_interrupts():
        Response(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_handler_that_the_block_sets_stays() -> None:
    with raise_dropped_interrupts():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_pass() -> None:
    ended = []

    def work() -> None:
        with raise_dropped_interrupts():
            ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended
