"""Ends in the way that its argument names."""

import atexit
import os
import signal
import sys
import threading

atexit.register(lambda: print("exit handler ran"))
print("buffered before the end", end="")
how = sys.argv[1]


class Odd(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Polite(SystemExit):
    pass


def fail(depth=2):
    if depth:
        fail(depth - 1)
    raise ValueError("the text")


def chain():
    try:
        fail()
    except ValueError as error:
        raise KeyError("key") from error


def context():
    try:
        fail()
    finally:
        {}["missing"]


def in_thread(call):
    thread = threading.Thread(target=call, name="worker-thread")
    thread.start()
    thread.join()


def linger():
    def late():
        main.join()
        print("the thread outlived the main program")

    main = threading.main_thread()
    threading.Thread(target=late).start()


def noisy_hook(kind, value, tb):
    frames = []
    while tb:
        frames.append(tb.tb_frame.f_code.co_name)
        tb = tb.tb_next
    print("hook", kind.__name__, value, frames, sys.last_value is value)


def failing_hook(kind, value, tb):
    raise RuntimeError("the hook fails")


def with_hook(hook):
    sys.excepthook = hook
    fail()


def without_hook():
    del sys.excepthook
    fail()


def at_exit():
    atexit.register(fail)


def fork_fails():
    pid = os.fork()
    if pid == 0:
        raise ValueError("in a forked child")
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def interrupted():
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()


def grouped():
    if sys.version_info >= (3, 11):
        raise ExceptionGroup("several", [ValueError("one"), KeyError("two")])
    raise ValueError("one")


def noted():
    error = ValueError("the text")
    if sys.version_info >= (3, 11):
        error.add_note("a note")
    raise error


WAYS = {
    "zero": lambda: None,
    "exit_none": lambda: sys.exit(None),
    "exit_text": lambda: sys.exit("a text"),
    "exit_seven": lambda: sys.exit(7),
    "exit_negative": lambda: sys.exit(-1),
    "exit_large": lambda: sys.exit(300),
    "exit_float": lambda: sys.exit(2.5),
    "exit_true": lambda: sys.exit(True),
    "exit_subclass": lambda: (_ for _ in ()).throw(Polite(5)),
    "os_exit": lambda: os._exit(3),
    "abort": os.abort,
    "sigterm": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raise": fail,
    "odd": lambda: (_ for _ in ()).throw(Odd()),
    "chain": chain,
    "context": context,
    "keyboard": lambda: (_ for _ in ()).throw(KeyboardInterrupt()),
    "interrupted": interrupted,
    "generator_exit": lambda: (_ for _ in ()).throw(GeneratorExit("gone")),
    "group": grouped,
    "noted": noted,
    "thread": lambda: in_thread(fail),
    "thread_exit": lambda: in_thread(lambda: sys.exit(9)),
    "linger": linger,
    "hook": lambda: with_hook(noisy_hook),
    "failing_hook": lambda: with_hook(failing_hook),
    "exiting_hook": lambda: with_hook(lambda *_: sys.exit(4)),
    "no_hook": without_hook,
    "at_exit": at_exit,
    "fork_fails": fork_fails,
    "unencodable": lambda: print("\udc80"),
    "broken_stdout": lambda: os.close(1),
    "recursion": lambda: fail(10**6),
}

if how == "list":
    print("\n" + "\n".join(WAYS))
else:
    WAYS[how]()
