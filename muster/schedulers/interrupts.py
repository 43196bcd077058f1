"""Ctrl-C, SIGTERM and SIGHUP are not lost while an adapter works.

A signal handler raises its exception wherever the main thread is at that moment. If an object is just being finalised,
Python drops the exception: `io.IOBase` clears it without a word, and other finalisers print "Exception ignored in". The
responses of HTTP clients end that way after every request, so one Ctrl-C in some hundred was lost.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def raise_dropped_interrupts() -> Iterator[None]:
    """Raise at the end of the block what a signal handler has raised in it, if the block ends as if it had not.

    Nothing in the block may catch KeyboardInterrupt and go on. Other threads than the main one get no signals.
    """
    raised: list[BaseException] = []
    with ExitStack() as restore:
        if threading.current_thread() is threading.main_thread():
            for signum in _SIGNALS:
                _record_interrupts(signum, raised, restore)
        yield
    if raised:
        raise raised[0]


def _record_interrupts(signum: signal.Signals, raised: list[BaseException], restore: ExitStack) -> None:
    handler: Callable[[int, FrameType | None], Any] | int | None = signal.getsignal(signum)
    if not callable(handler):  # it ends the process, or is ignored
        return
    call = handler

    def record(got: int, frame: FrameType | None) -> None:
        try:
            call(got, frame)
        except BaseException as error:  # may be dropped otherwise
            raised.append(error)
            raise

    signal.signal(signum, record)
    restore.callback(_restore_handler, signum, record, handler)


def _restore_handler(signum: signal.Signals, ours: Callable[..., None], handler: Callable[..., Any]) -> None:
    if signal.getsignal(signum) is ours:
        signal.signal(signum, handler)
