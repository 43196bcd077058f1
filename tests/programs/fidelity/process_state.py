import locale
import os
import resource
import signal
import sys
import threading

print("parent", os.getppid() == int(os.environ["PROBE_PARENT"]))
print("session", os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid())
print("descriptors", [fd for fd in range(1000) if os.path.exists(f"/proc/self/fd/{fd}")])
with open(__file__) as first:
    print("first descriptor", first.fileno())
dispositions = {}
for number in sorted(signal.valid_signals()):
    handler = signal.getsignal(number)
    dispositions[int(number)] = getattr(handler, "__name__", str(handler))
dispositions.pop(59)  # the stack signal is caught in C
print("dispositions", dispositions)
print("mask", signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.sigpending())
with open("/proc/self/status") as file:
    kept = ("SigBlk", "SigIgn", "Seccomp", "NoNewPrivs", "CapEff", "Threads", "Umask", "Groups", "Uid", "Cpus_allowed_list")
    print([line.split() for line in file if line.split(":")[0] in kept])
print("cwd", os.getcwd())
print("limits", [resource.getrlimit(getattr(resource, name)) for name in sorted(dir(resource)) if name.startswith("RLIMIT_")])
print("nice", os.nice(0), "policy", os.sched_getscheduler(0))
with open("/proc/self/oom_score_adj") as file:
    print("oom", file.read().strip())
print("threads", len(os.listdir("/proc/self/task")), threading.current_thread().name, threading.main_thread() is threading.current_thread())
print("native id", threading.get_native_id() == os.getpid(), threading.main_thread().native_id == os.getpid())
print("locale", locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(), sys.getfilesystemencoding())
for name in ("stdin", "stdout", "stderr"):
    stream = getattr(sys, name)
    print(name, stream is getattr(sys, f"__{name}__"), stream.name, stream.mode, stream.encoding, stream.errors)
    print(name, stream.line_buffering, stream.write_through, stream.isatty(), stream.fileno(), stream.newlines)
    raw = getattr(stream.buffer, "raw", stream.buffer)
    print(name, type(stream.buffer).__name__, type(raw).__name__, raw.name, raw.mode, raw.closefd)
print("environment", sorted((key, value) for key, value in os.environ.items() if key != "PROBE_PARENT"))
print("getenv in C", os.popen("echo $PROBE_WORD").read().strip())
import tempfile

print("temporary", tempfile.gettempdir(), tempfile.tempdir)
import gc

print("collector", gc.isenabled(), gc.get_threshold(), gc.get_debug())
import sysconfig

print("recursion", sys.getrecursionlimit(), sys.getswitchinterval(), sysconfig.get_config_var("VERSION"))
print("died with", __import__("ctypes").CDLL(None).prctl(3, 0, 0, 0, 0))  # PR_GET_DUMPABLE
