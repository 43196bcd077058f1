"""Programs that leave something behind, and whether a warm worker that runs them may end early.

Each ends alike under `python`, in a cold and in a warm worker: exit code, output and the files in its working
directory, which is empty at first. `workers/warm/early_end` says what an early end does. A row with `early=False` has
something at its end that could be seen, or ends in another way than through the interpreter.

A long file, because it is a table.
"""

import sys
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EndProgram:
    """A program and its end."""

    source: str
    early: bool = False
    shows_frames: bool = False
    """Standard error has frames of `workers/program`, which says why, and is not compared with plain Python's."""


LOUD = """
import os
class Loud:
    def __init__(self, name):
        self.name = name
    def __del__(self, write=os.write):
        write(1, f"{self.name} is destroyed\\n".encode())
"""

FAIL = """
def fail(depth=2):
    if depth:
        fail(depth - 1)
    raise ValueError("the text")
"""

SUSPENDED = """
import os
def suspended(write=os.write):  # when `os` itself is cleared depends on what else imports it
    try:
        yield 1
    finally:
        write(1, b"the generator is closed\\n")
generator = suspended()
next(generator)
"""

UNWRITTEN = """
import os
file = open(os.dup(1), "w")
file.write("written when the file is closed\\n")
"""

GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
values = torch.ones(4)
dist.all_reduce(values)
print(values)
"""


def early(source: str, *before: str) -> EndProgram:
    """A program whose warm worker ends early; `before` are the parts that it begins with."""
    return EndProgram(source="".join(before) + source, early=True)


def late(source: str, *before: str) -> EndProgram:
    """A program that the interpreter ends, or that ends itself."""
    return EndProgram(source="".join(before) + source)


EXIT_CODES = {
    "nothing": early(""),
    "exit_none": early("import sys; sys.exit(None)"),
    "exit_text": early("import sys; sys.exit('a text')"),
    "exit_seven": early("import sys; sys.exit(7)"),
    "exit_negative": early("import sys; sys.exit(-1)"),
    "exit_large": early("import sys; sys.exit(300)"),
    "exit_huge": late("import sys; sys.exit(1 << 40)"),
    "exit_float": early("import sys; sys.exit(2.5)"),
    "exit_true": early("import sys; sys.exit(True)"),
    "exit_tuple": late("import sys; sys.exit((1, 'two'))"),
    "exit_subclass": late("""
class Polite(SystemExit):
    pass
raise Polite(5)
"""),
    "exit_in_finally": early("import sys\ntry:\n    1 / 0\nfinally:\n    sys.exit(3)"),
    "os_exit": late("import os; print('buffered', end=''); os._exit(3)"),
    "abort": late("import faulthandler, os; faulthandler.disable(); os.abort()"),
    "killed": late("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
    "terminated": late("import os, signal; os.kill(os.getpid(), signal.SIGTERM)"),
    "execs": late("import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'print(1); exit(5)'])"),
}

EXCEPTIONS = {
    "raises": early(FAIL + "fail()"),
    "raises_chain": early(FAIL + "try:\n    fail()\nexcept ValueError as error:\n    raise KeyError('key') from error"),
    "raises_in_finally": early(FAIL + "try:\n    fail()\nfinally:\n    {}['missing']"),
    "raises_with_notes": early("""
error = ValueError("the text")
if hasattr(error, "add_note"):
    error.add_note("a note")
raise error
"""),
    "raises_unprintable": early("""
class Odd(Exception):
    def __str__(self):
        raise RuntimeError("no text")
raise Odd
"""),
    "raises_with_locals": late(
        """
def fail():
    local, pending = Loud("local"), file
    raise KeyError(local.name)
fail()
""",
        LOUD,
        SUSPENDED,
        UNWRITTEN,
    ),
    "interrupted": late("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nsignal.pause()"),
    "keyboard": late("raise KeyboardInterrupt"),
    "generator_exit": early("raise GeneratorExit('gone')"),
    "hook": early(
        """
import sys
sys.excepthook = lambda kind, value, tb: print("hook", kind.__name__, value, sys.last_value is value)
fail()
""",
        FAIL,
    ),
    "hook_fails": EndProgram(
        source=f"""{FAIL}
import sys
def hook(kind, value, tb):
    raise RuntimeError("the hook fails")
sys.excepthook = hook
fail()
""",
        shows_frames=True,
    ),
    "hook_exits": late(FAIL + "import sys\nsys.excepthook = lambda *_: sys.exit(4)\nfail()"),
    "hook_deleted": late(FAIL + "import sys\ndel sys.excepthook\nfail()"),
    "unraisable_hook": late(
        """
import sys
sys.unraisablehook = lambda about: print("unraisable", about.exc_value)
class Failing:
    def __del__(self):
        raise ValueError("at its end")
failing = Failing()
""",
        LOUD,
    ),
    "thread_hook": early(
        """
import threading
threading.excepthook = lambda about: print("hook", about.exc_type.__name__)
threading.Thread(target=fail).start()
""",
        FAIL,
    ),
    "group": early("""
import sys
raise ExceptionGroup("several", [ValueError("one"), KeyError("two")]) if sys.version_info >= (3, 11) else ValueError
"""),
}

EXIT_HANDLERS = {
    "atexit": early("import atexit\natexit.register(print, 'first')\natexit.register(print, 'second')"),
    "atexit_fails": early(FAIL + "import atexit\natexit.register(print, 'runs')\natexit.register(fail)"),
    "atexit_exits": early("import atexit, sys\natexit.register(sys.exit, 9)"),
    "atexit_os_exit": late("import atexit, os\natexit.register(os._exit, 9)"),
    "atexit_registers": early("""
import atexit
atexit.register(lambda: atexit.register(print, "registered while it ends"))
"""),
    "atexit_starts_a_thread": early("""
import atexit, threading
def start():
    try:
        thread = threading.Thread(target=print, args=("a late thread",))
        thread.start()
        thread.join()
    except RuntimeError as error:
        print(error)
atexit.register(start)
"""),
    "atexit_then_raises": early(FAIL + "import atexit\natexit.register(print, 'runs')\nfail()"),
    "atexit_signals": early("""
import atexit, os, signal, time
def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
atexit.register(interrupt)
"""),
    "finalize_only": early("""
import weakref
class Thing:
    pass
thing = Thing()
weakref.finalize(thing, print, "finalized")
"""),
    "finalize_not_at_exit": late("""
import os, weakref
class Thing:
    pass
thing = Thing()
weakref.finalize(thing, os.write, 1, b"the thing is gone").atexit = False
"""),
}

OBJECTS = {
    "object": late(LOUD + "thing = Loud('object')"),
    "object_order": late(LOUD + "b, _a, a, _b = map(Loud, ['b', '_a', 'a', '_b'])"),
    "object_of_slots": late("""
import json, os
class Small:
    __slots__ = ()
    def __del__(self, write=os.write):
        write(1, b"a small object is destroyed")
json.kept_by_the_template = Small()
"""),
    "object_cycle": late(LOUD + "one, other = map(Loud, 'ab')\none.other, other.one = other, one"),
    "object_garbage": early(
        LOUD + "import gc\ngc.collect()\ngc.disable()\ngc.enable()\none = Loud('a')\none.own = one\ndel one"
    ),
    "object_garbage_uncollected": late(LOUD + "import gc\ngc.disable()\none = Loud('a')\none.own = one\ndel one"),
    "object_frozen": late(LOUD + "import gc\nthing = Loud('frozen')\ngc.freeze()"),
    "object_elsewhere": late(LOUD + "import json\njson.kept_by_the_template = Loud('kept by json')"),
    "object_of_builtins": late(LOUD + "import builtins\nbuiltins.kept = Loud('kept by builtins')"),
    "object_cached": late(LOUD + "import functools\ncached = functools.lru_cache(Loud)\ncached('cached')"),
    "object_of_a_context": late(LOUD + "import contextvars\ncontextvars.ContextVar('v').set(Loud('in a context'))"),
    "object_of_a_thread_local": late(LOUD + "import threading\nlocal = threading.local()\nlocal.a = Loud('local')"),
    "object_of_a_module": late(
        """
import sys
module = type(sys)("own_module")
module._private, module.public, module.both = Loud("private"), Loud("public"), [Loud("listed")]
module.itself = sys.modules["own_module"] = module
""",
        LOUD,
    ),
    "object_of_sys": late(LOUD + "import sys\nsys.path_hooks.append(Loud('a hook'))\nsys.kept = Loud('an attribute')"),
    "weak_callback": late("""
import os, weakref
class Thing:
    pass
reference = weakref.ref(Thing, lambda _: os.write(1, b"the callback ran"))
"""),
    "weak_callback_on_the_template": late("""
import json, os, weakref
reference = weakref.ref(json.JSONDecoder, lambda _, write=os.write: write(1, b"the callback ran"))
"""),
    "weak_collections": early("""
import weakref
class Thing:
    pass
thing = Thing()
known = weakref.WeakSet([thing]), weakref.WeakKeyDictionary({thing: 1}), weakref.WeakValueDictionary({1: thing})
"""),
    "weak_proxy_that_is_dead": early("""
import json, weakref
class Thing:
    pass
json.kept_by_the_template = weakref.proxy(Thing())
"""),
    "generator": late(SUSPENDED),
    "generator_elsewhere": late(SUSPENDED + "import json\njson.kept_by_the_template = generator"),
    "generator_done": early("generator = (i for i in range(3))\nprint(list(generator))"),
    "coroutine": late("""
async def run():
    pass
coroutine = run()
"""),
    "exit_stack": early("import contextlib\nstack = contextlib.ExitStack()"),
}

STREAMS = {
    "buffered": early("print('without a line end', end='')"),
    "stdout_closed": late("import sys\nprint('before')\nsys.stdout.close()"),
    "stdout_none": late("import sys\nsys.stdout = None"),
    "stdout_gone": early("import os\nos.close(1)"),
    "stdout_full": early("import os\nos.dup2(os.open('/dev/full', os.O_WRONLY), 1)\nprint('lost')"),
    "stdout_unread": early("import os\nr, w = os.pipe()\nos.dup2(w, 1)\nos.close(r)\nprint('lost')"),
    "stderr_full": early("import os\nos.dup2(os.open('/dev/full', os.O_WRONLY), 2)\n1 / 0"),
    "stderr_full_text": early("import os, sys\nos.dup2(os.open('/dev/full', os.O_WRONLY), 2)\nsys.exit('a text')"),
    "stderr_closed": late("import sys\nsys.stderr.close()\n1 / 0"),
    "stdout_buffers": late("import os, sys\nsys.stdout = open(os.dup(1), 'w')\nprint('in a buffer')"),
    "stdout_replaced": late("""
import sys
class Shout:
    def __init__(self, stream):
        self.stream = stream
    def write(self, text):
        return self.stream.write(text.upper())
    def flush(self):
        self.stream.write("flushed\\n")
        self.stream.flush()
sys.stdout = Shout(sys.stdout)
print("loud")
"""),
    "stdout_reconfigured": early("""
import sys
sys.stdout.reconfigure(write_through=False, line_buffering=False)
print("in a buffer")
"""),
    "redirected": early("""
import contextlib, io
text = io.StringIO()
with contextlib.redirect_stdout(text):
    print("into memory")
print(text.getvalue())
"""),
    "unencodable": early(r"print('\udc80')"),
    "second_stdout": late("again = open(1, 'w', closefd=False)\nagain.write('in a buffer')"),
    "second_stdout_elsewhere": late(
        "import json\njson.kept = open(1, 'w', closefd=False)\njson.kept.write('in a buffer')"
    ),
    "c_text": early("import ctypes\nctypes.CDLL(None).printf(b'text in a buffer of C\\n')"),
    "file": late("file = open('kept', 'w')\nfile.write('a line\\n')"),
    "file_elsewhere": late("import json\njson.kept = open('kept', 'w')\njson.kept.write('a line\\n')"),
    "file_closed": early("with open('kept', 'w') as file:\n    file.write('a line\\n')"),
    "file_read": late("open('kept', 'w').close()\nfile = open('kept')\nfile.read()"),
    "file_zipped": late("import gzip\nfile = gzip.GzipFile('kept.gz', 'wb', mtime=0)\nfile.write(b'text')"),
    "file_mapped": early("""
import mmap
with open("kept", "w+b") as file:
    file.write(b"some text")
    file.flush()
    mapped = mmap.mmap(file.fileno(), 0)
mapped[:4] = b"more"
"""),
    "file_warned_of": late(
        "import warnings\nwarnings.simplefilter('default')\nopen('kept', 'w').close()\nfile = open('kept')"
    ),
    "detached": late("import io, json\njson.kept = io.TextIOWrapper(io.BytesIO())\njson.kept.detach()"),
    "temporary_file": late("""
import tempfile
file = tempfile.NamedTemporaryFile("w", prefix="left", dir=".")
file.write("text")
"""),
    "temporary_folder": early(
        "import tempfile\nfolder = tempfile.TemporaryDirectory(dir='.')\nopen(folder.name + '/a', 'w').close()"
    ),
    "shelf": late("import shelve\nshelf = shelve.open('kept', writeback=True)\nshelf['a'] = [1]"),
    # Left open: it has a finalizer of its own since Python 3.12, and was an object of C only.
    "database": EndProgram(
        early=sys.version_info < (3, 12),
        source="""
import sqlite3
database = sqlite3.connect("kept.db")
database.execute("pragma journal_mode=wal")
database.execute("create table t (a)")
database.execute("insert into t values (1)")
""",
    ),
    "no_descriptors": late("""
import contextlib, os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with contextlib.suppress(OSError):
    while True:
        os.open(os.devnull, os.O_RDONLY)
"""),
}

LOGGING = {
    "logging": early("import logging\nlogging.basicConfig(filename='log')\nlogging.warning('a line')"),
    "logging_at_the_end": late("""
import logging
logging.basicConfig(filename="log")
class Last:
    def __del__(self, warn=logging.warning):
        warn("the last line")
last = Last()
"""),
    "warning": early("import warnings\nwarnings.warn('a warning')"),
    "faulthandler": early("import faulthandler\nfaulthandler.enable()\nfaulthandler.dump_traceback_later(100)"),
    "faulthandler_file": late("import faulthandler\nfile = open('faults', 'w')\nfaulthandler.enable(file)"),
}

THREADS = {
    "thread": early(
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('done'))).start()"
    ),
    "thread_fails": early(FAIL + "import threading\nthreading.Thread(target=fail, name='t').start()"),
    "thread_exits": early("import sys, threading\nthreading.Thread(target=sys.exit, args=(9,)).start()"),
    "thread_lingers": early("""
import threading
main = threading.main_thread()
threading.Thread(target=lambda: (main.join(), print("the thread outlived the main program"))).start()
"""),
    "daemon_waits": late("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"),
    "timer": early("import threading\nthreading.Timer(0.1, print, ['the timer is due']).start()"),
    "executor": early("""
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(2)
future = pool.submit(print, "submitted")
"""),
    "queue_listener": late("""
import logging, logging.handlers, queue
listener = logging.handlers.QueueListener(queue.Queue(), logging.FileHandler("log"))
listener.start()
listener.queue.put(logging.makeLogRecord({"msg": "a line"}))
listener.queue.join()
"""),
}

ASYNCIO = {
    "asyncio": early(
        "import asyncio\nasync def run():\n    await asyncio.sleep(0)\n    print('ran')\nasyncio.run(run())"
    ),
    "asyncio_fails": late("import asyncio\nasync def run():\n    raise ValueError('no')\nasyncio.run(run())"),
    "asyncio_exits": early("import asyncio, sys\nasync def run():\n    sys.exit(6)\nasyncio.run(run())"),
    "asyncio_loop_left_open": late("import asyncio\nloop = asyncio.new_event_loop()"),
    "asyncio_task_left": late("""
import asyncio
async def run():
    await asyncio.sleep(100)
loop = asyncio.new_event_loop()
task = loop.create_task(run())
loop.run_until_complete(asyncio.sleep(0))
"""),
    "asyncio_generator": late("""
import asyncio
async def count():
    try:
        yield 1
    finally:
        print("the generator is closed")
async def run():
    global counting
    counting = count()
    await counting.__anext__()
asyncio.run(run())
"""),
}

PROCESSES = {
    "fork": late(
        """
import os
if os.fork():
    os.wait()
    thing = Loud("of the parent")
""",
        LOUD,
    ),
    "fork_fails": early("""
import os
pid = os.fork()
if pid == 0:
    raise ValueError("in a forked child")
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""),
    "subprocess": early("import subprocess\nsubprocess.run(['echo', 'a child'], check=True)"),
    "subprocess_left": late("import subprocess\nchild = subprocess.Popen(['sleep', '0.2'])"),
    "subprocess_pipe": late("""
import atexit, subprocess
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, text=True)
atexit.register(lambda: (child.stdin.close(), child.wait()))  # what it writes later is seen now and then only
child.stdin.write("a line for the child")
"""),
    "multiprocessing_not_joined": late("""
import multiprocessing, time
child = multiprocessing.get_context("fork").Process(target=lambda: (time.sleep(0.2), print("a child")))
child.start()
"""),
    "multiprocessing_queue": late("""
import multiprocessing
queue = multiprocessing.get_context("fork").Queue()
queue.put("a text")
print(queue.get())
"""),
    "shared_memory": late("""
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=10)
memory.unlink()
"""),
    "socket": late("import socket\none = socket.socket()"),
    "socket_pair": late("import socket\npair = socket.socketpair()\npair[0].send(b'text')"),
}

SIGNALS = {
    "handler": early("""
import os, signal
signal.signal(signal.SIGTERM, lambda *_: print("handled"))
os.kill(os.getpid(), signal.SIGTERM)
"""),
    "handler_exits": early("""
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(17))
os.kill(os.getpid(), signal.SIGTERM)
signal.pause()
"""),
    "alarm_left": early("import signal\nsignal.signal(signal.SIGALRM, print)\nsignal.alarm(100)"),
    "wakeup": late("""
import signal, socket
one, other = socket.socketpair()
one.setblocking(False)
signal.set_wakeup_fd(one.fileno())
"""),
    "trace": late("import sys\nsys.settrace(lambda *_: None)"),
    "profile": late("import sys\nsys.setprofile(lambda *_: None)"),
    "collector_callback": late("import gc\ngc.callbacks.append(lambda phase, about: None)"),
    "path": early("import pathlib, sys\nsys.path.append(pathlib.Path('folder'))"),
    "module_removed": early("import json, sys\ndel sys.modules['json']"),
    "library": late("import ctypes\nctypes.CDLL('libBrokenLocale.so.1')"),
    "library_of_the_name_service": early("import ctypes\nctypes.CDLL('libnss_compat.so.2')"),
    "module_of_the_name_service": early("""
import ctypes, socket
ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"hesiod files")  # as a line of /etc/nsswitch.conf
socket.getaddrinfo("localhost", 1)
with open("/proc/self/maps", "rb") as file:
    assert b"libnss_hesiod.so" in file.read()
"""),
    "inspect": late("import os\nos.environ['PYTHONINSPECT'] = '1'"),
}

TORCH = {
    "torch_backward": early("""
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print(model.weight.shape)
"""),
    "torch_loader": late("""
import torch.utils.data as data
loader = data.DataLoader(range(8), num_workers=1, persistent_workers=True)
print(sum(int(batch) for batch in loader))
"""),
    "gloo": early(GLOO + "work = dist.all_reduce(values, async_op=True)"),
    "gloo_and_object": late(GLOO + LOUD + "thing = Loud('after the group')"),
    "gloo_raises": early(GLOO + "work = dist.all_reduce(values, async_op=True)\n{}['missing']"),
}

LIGHT = {
    **EXIT_CODES,
    **EXCEPTIONS,
    **EXIT_HANDLERS,
    **OBJECTS,
    **STREAMS,
    **LOGGING,
    **THREADS,
    **ASYNCIO,
    **PROCESSES,
    **SIGNALS,
}
"""Without those of `TORCH`."""
