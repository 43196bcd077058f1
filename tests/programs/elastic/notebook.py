"""Drives a real notebook kernel: `notebook.py SCENARIO,...`. Without torch."""

import os
import sys
import time

from jupyter_client.manager import KernelManager

LIMIT_S = 90


class Kernel:
    """A kernel and the outputs of its cells."""

    def __init__(self):
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=LIMIT_S)

    def start(self, code):
        return self.client.execute(code)

    def read(self, cell, until=None):
        """Messages of a cell up to its end, or to the first whose text has `until`."""
        found = []
        while True:
            message = self.client.get_iopub_msg(timeout=LIMIT_S)
            if message["parent_header"].get("msg_id") != cell:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return found
            if kind in ("stream", "error", "display_data", "update_display_data", "execute_result"):
                found.append((kind, content))
                if until and until in text_of(found):
                    return found

    def run(self, code):
        return self.read(self.start(code))

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel()
        self.manager.cleanup_resources()


def text_of(found):
    return "".join(content["text"] for kind, content in found if kind == "stream")


def errors_of(found):
    return [content["ename"] for kind, content in found if kind == "error"]


SETUP = """
import os, signal, sys, time
from muster.elastic import LaunchFailed, launch
rank = lambda: int(os.environ["RANK"])
def fork(function, *args, **options):
    return launch(function, args, nproc=2, start_method="fork", log_dir="/dev/null", **options)
"""


def output(kernel):
    kernel.run(SETUP)
    found = kernel.run(
        """
def work(large):
    if rank() == 0:
        print("first on stdout")
        print("second on stderr", file=sys.stderr)
        print("third on stdout")
    for step in range(12):
        sys.stderr.write(f"\\r{step}/12 done")
        time.sleep(0.2)
    sys.stderr.write("\\n")
    return rank(), len(large)
print(dict(fork(work, [1, 2, 3])))
"""
    )
    lines = text_of(found).splitlines()
    print([line for line in lines if "0]:" in line and "done" not in line])
    print([line for line in lines if line.startswith("{")], any("\r" in line for line in lines))
    print("few lines of bars:", sum("done" in line for line in lines) <= 4)
    shown = [content["data"]["text/plain"] for kind, content in found if "display" in kind]
    print("bars are drawn in place:", any("0]:" in text and "1]:" in text for text in shown), repr(shown[-1:]))
    found = kernel.run("def fail():\n    raise ValueError('the text')\nfork(fail)")
    shown = [" ".join(content["traceback"]) for kind, content in found if kind == "error"]
    print(errors_of(found), all(text in shown[0] for text in ("ValueError", "the text", "in fail", "LaunchFailed")))
    print(errors_of(kernel.run("assert isinstance(sys.last_value.__cause__, ValueError)")))


def inherit(kernel):
    """Workers have the program's files, and none of the sockets by which the kernel talks to its clients."""
    kernel.run(SETUP)
    found = kernel.run(
        """
import socket, stat, tempfile
from ipykernel.kernelapp import IPKernelApp
application = IPKernelApp.instance()
ports = {getattr(application, f"{name}_port") for name in ("shell", "iopub", "stdin", "control", "hb")}
file = tempfile.TemporaryFile()
file.write(b"the text"); file.flush()
def list_open():
    open_ports = set()
    for fd in range(3, 1000):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                name = socket.socket(fileno=os.dup(fd)).getsockname()
                open_ports.add(name[1] if isinstance(name, tuple) else 0)
        except OSError: pass
    return len(open_ports & ports), os.pread(file.fileno(), 9, 0)
print(list_open(), dict(fork(list_open)))
"""
    )
    print(text_of(found).strip(), errors_of(found))


def stop(kernel):
    kernel.run(SETUP)
    code = """
def work(polite):
    def end(*_):
        os.write(1, b"got the signal\\n")
        if polite: os._exit(0)
    signal.signal(signal.SIGTERM, end)
    os.write(1, b"ready\\n")
    while True: time.sleep(0.1)
fork(work, {polite})
"""
    cell = kernel.start(code.format(polite=True))
    wait_for(kernel, cell, "ready", 2)
    kernel.manager.interrupt_kernel()
    found = kernel.read(cell)
    print(errors_of(found), text_of(found).count("got the signal"))
    cell = kernel.start(code.format(polite=False))
    wait_for(kernel, cell, "ready", 2)
    kernel.manager.interrupt_kernel()
    wait_for(kernel, cell, "got the signal", 2)
    kernel.manager.interrupt_kernel()
    print(errors_of(kernel.read(cell)))
    print(text_of(kernel.run("print(dict(fork(rank)))")).splitlines()[-1])


def wait_for(kernel, cell, text, times):
    seen = ""
    while seen.count(text) < times:
        found = kernel.read(cell, until=text)
        if not found:
            raise SystemExit(f"the cell ended before {text!r} came {times} times: {seen!r}")
        seen += text_of(found)


def die(kernel):
    """The kernel is killed; the test looks for what is left."""
    kernel.run(SETUP)
    cell = kernel.start("fork(lambda: (os.write(1, b'ready\\n'), time.sleep(600)))")
    wait_for(kernel, cell, "ready", 2)


def restart(kernel):
    die(kernel)
    kernel.manager.restart_kernel(now=True)
    kernel.client.wait_for_ready(timeout=LIMIT_S)
    kernel.run(SETUP)
    print(text_of(kernel.run("print(dict(fork(rank)))")).splitlines()[-1])


if __name__ == "__main__":
    kernel = Kernel()
    try:
        for scenario in sys.argv[1].split(","):
            globals()[scenario](kernel)
    finally:
        kernel.close()
