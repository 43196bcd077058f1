"""Ends in the way that its argument names."""

import atexit
import os
import sys
import threading

atexit.register(lambda: print("exit handler ran"))
print("buffered before the end", end="")


class Odd(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def fail(depth=2):
    if depth:
        fail(depth - 1)
    raise ValueError("the text")


def chain():
    try:
        fail()
    except ValueError as error:
        raise KeyError("key") from error


def in_thread(call):
    thread = threading.Thread(target=call, name="worker-thread")
    thread.start()
    thread.join()


def failing_hook(kind, value, tb):
    raise RuntimeError("the hook fails")


def with_hook(hook):
    sys.excepthook = hook
    fail()


def fork_fails():
    pid = os.fork()
    if pid == 0:
        raise ValueError("in a forked child")
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


WAYS = {
    "zero": lambda: None,
    "exit_text": lambda: sys.exit("a text"),
    "raise": fail,
    "odd": lambda: (_ for _ in ()).throw(Odd()),
    "chain": chain,
    "keyboard": lambda: (_ for _ in ()).throw(KeyboardInterrupt()),
    "generator_exit": lambda: (_ for _ in ()).throw(GeneratorExit("gone")),
    "thread": lambda: in_thread(fail),
    "failing_hook": lambda: with_hook(failing_hook),
    "fork_fails": fork_fails,
    "recursion": lambda: fail(10**6),
}
WAYS[sys.argv[1]]()
