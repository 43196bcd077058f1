"""Leaves something behind that has its own end, in the way that its argument names."""

import atexit
import builtins
import contextlib
import ctypes
import functools
import gc
import io
import json
import logging
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
import weakref

how = sys.argv[1]
folder = os.environ["TMPDIR"] = tempfile.mkdtemp()


class Loud:
    """Says that it is destroyed, and what it can still use then."""

    def __init__(self, name):
        self.name = name

    def __del__(self, write=os.write):
        write(1, f"{self.name} is destroyed\n".encode())


class Curious(Loud):
    """Its end looks at the interpreter."""

    def __del__(self, write=os.write, sys=sys):
        state = (sys.is_finalizing(), sys.meta_path is None, sys.path is None, "os" in sys.modules)
        write(1, f"{state} {logging is None} {how!r}\n".encode())


class Importing(Loud):
    """Its end imports what is loaded."""

    def __del__(self):
        import json

        json.dumps(1)


class Failing(Loud):
    """Its end fails."""

    def __del__(self):
        raise ValueError(f"{self.name} fails at its end")


def suspended():
    try:
        yield 1
    finally:
        os.write(1, b"the generator is closed\n")


def keep(*things):
    """Keep in this module."""
    globals().setdefault("kept", []).extend(things)


def cycle():
    one, other = Loud("one of a cycle"), Loud("the other of a cycle")
    one.other, other.one = other, one
    keep(one)


def unreachable_cycle():
    gc.disable()
    one = Loud("garbage")
    one.itself = one


def write_file(where):
    file = open(os.dup(1), "w", encoding="utf-8")  # noqa: SIM115  # left open, with text that is not written yet
    file.write("written when the file is closed\n")
    where(file)


def keep_elsewhere(thing):
    json.kept_by_the_template = thing


def daemon_prints():
    def run():
        while True:
            time.sleep(0.001)
            globals()["how"].upper()

    threading.Thread(target=run, daemon=True).start()


def start_generator(where):
    generator = suspended()
    next(generator)
    where(generator)


def own_module():
    module = type(sys)("own_module")
    module._private, module.public, module.both = Loud("private"), Loud("public"), [Loud("listed")]
    module.itself = module
    sys.modules["own_module"] = module
    keep(module)


def c_text():
    ctypes.CDLL(None).printf(b"text in C's buffer\n")


def wait_for_thread():
    threading.Thread(target=lambda: (time.sleep(0.2), print("the thread is done"))).start()


def log():
    handler = logging.FileHandler(os.path.join(folder, "log"))
    logging.getLogger().addHandler(handler)
    logging.getLogger().warning("a line")
    atexit.register(lambda: print(open(handler.baseFilename, encoding="utf-8").read()))


def finalize():
    thing = Loud("thing")
    weakref.finalize(thing, print, "finalized")
    keep(thing)


def weak_callback():
    thing = Loud("referenced")
    keep(weakref.ref(thing, lambda _: os.write(1, b"the callback ran\n")), thing)


def fork_and_fail():
    if os.fork() == 0:
        return
    os.wait()
    keep(Loud("of the parent"))


def aborts_in_c():
    """What C's exit runs: the early end does not, so a probe can tell which end was taken."""
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(libc.abort, ctypes.c_void_p), None)


def replaced_stdout():
    class Shout:
        def __init__(self, stream):
            self.stream = stream

        def write(self, text):
            return self.stream.write(text.upper())

        def flush(self):
            self.stream.write("flushed\n")
            self.stream.flush()

    sys.stdout = Shout(sys.stdout)
    print("loud")


def no_descriptors():
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    with contextlib.suppress(OSError):
        while True:
            keep(os.open(os.devnull, os.O_RDONLY))


def detached():
    text = io.TextIOWrapper(io.BytesIO())
    text.detach()
    return text


def gloo():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    values = torch.ones(4)
    dist.all_reduce(values)
    print(values)
    keep(dist.all_reduce(values, async_op=True), Loud("after the group"))


def fail_with_locals():
    """What the frames of a traceback hold is destroyed with them."""
    local, file = Loud("local"), open(os.dup(1), "w", encoding="utf-8")  # noqa: SIM115  # as above
    file.write("written when the frame is gone\n")
    generator = suspended()
    next(generator)
    raise KeyError(local.name)


def fail_under_a_hook(hook):
    sys.excepthook = hook
    raise ValueError("the hook decides")


WAYS = {
    "object": lambda: keep(Loud("object")),
    "order": lambda: globals().update(b=Loud("b"), _a=Loud("_a"), a=Loud("a"), _b=Loud("_b")),
    "cycle": cycle,
    "unreachable": unreachable_cycle,
    "file": lambda: write_file(keep),
    "file_elsewhere": lambda: write_file(keep_elsewhere),
    "generator": lambda: start_generator(keep),
    "generator_elsewhere": lambda: start_generator(keep_elsewhere),
    "elsewhere": lambda: keep_elsewhere(Loud("kept by json")),
    "builtins": lambda: setattr(builtins, "kept", Loud("kept by builtins")),
    "cached": lambda: functools.lru_cache(Loud)("cached"),
    "importing": lambda: keep(Importing("importing")),
    "failing": lambda: keep(Failing("failing")),
    "curious": lambda: keep(Curious("curious")),
    "own_module": own_module,
    "daemon": daemon_prints,
    "thread": wait_for_thread,
    "log": log,
    "c_text": c_text,
    "finalize": finalize,
    "weak_callback": weak_callback,
    "fork": fork_and_fail,
    "replaced_stdout": replaced_stdout,
    "no_descriptors": no_descriptors,
    "detached": lambda: keep_elsewhere(detached()),
    "dead_proxy": lambda: keep_elsewhere(weakref.proxy(Loud("referenced"))),
    "path": lambda: sys.path.append(pathlib.Path(folder)),
    "exit_stack": lambda: keep(contextlib.ExitStack()),
    "gloo": gloo,
    "exception": lambda: (keep(Loud("object")), {}["missing"]),
    "exits": lambda: (keep(Loud("object")), sys.exit(7)),
    "exception_locals": fail_with_locals,
    "exception_hook": lambda: fail_under_a_hook(lambda *_: print("hooked")),
    "exception_hook_exits": lambda: fail_under_a_hook(lambda *_: sys.exit(7)),
    "exception_thread": lambda: (wait_for_thread(), {}["missing"]),
    "gloo_exception": lambda: (gloo(), {}["missing"]),
    "interrupt": lambda: (keep(Loud("object")), signal.raise_signal(signal.SIGINT)),
    "aborts_in_c": aborts_in_c,
    "aborts_in_c_names": lambda: (aborts_in_c(), ctypes.CDLL("libnss_compat.so.2")),
    "aborts_in_c_exception": lambda: (aborts_in_c(), fail_with_locals()),
    "aborts_in_c_elsewhere": lambda: (aborts_in_c(), keep_elsewhere(Loud("kept by json"))),
}

if how == "list":
    print("\n".join(WAYS))
else:
    WAYS[how]()
