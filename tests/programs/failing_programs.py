"""One program for each attempt: each fails in its own way, after a step. `PROGRAMS` has their classes."""

import os

PROGRAMS = (
    ("usage", "import argparse; argparse.ArgumentParser().parse_args(['--lr'])"),
    ("usage", "import no_such_module"),
    ("usage", "compile('def f(:', 'x.py', 'exec')"),
    ("usage", "open('/nonexistent/data.csv')"),
    ("usage", "import torch; torch.ones(8, 4) @ torch.ones(5, 2)"),
    ("usage", "import torch; torch.ones(3) + torch.ones(4)"),
    ("usage", "import torch; torch.nn.Linear(2, 3).load_state_dict(torch.nn.Linear(4, 3).state_dict())"),
    ("usage", "import torch; torch.nn.Linear(2, 3).load_state_dict({})"),
    ("usage", "import torch; torch.ones(10).view(3, 4)"),
    ("usage", "import torch; torch.nn.Conv2d(3, 4, 3)(torch.ones(1, 4, 8, 8))"),
    ("data", "import io, zipfile; zipfile.ZipFile(io.BytesIO(b'abc'))"),
    ("data", "import io, torch; torch.load(io.BytesIO(b'garbage' * 100))"),
    ("data", "import io, torch; f = io.BytesIO(); torch.save(torch.ones(999), f); torch.load(io.BytesIO(f.getvalue()[:999]))"),
    ("data", "import pickle; pickle.loads(pickle.dumps(list(range(100)))[:50])"),
    ("data", "import json; json.loads('{')"),
    ("data", "b'\\xff'.decode()"),
    ("data", "import gzip; gzip.decompress(gzip.compress(b'a' * 100000)[:50])"),
    ("data", "import io, tarfile; tarfile.open(fileobj=io.BytesIO(b'abc'))"),
    ("host-oom", "bytearray(1 << 62)"),
    ("host-oom", "import torch; torch.empty(1 << 44)"),
    ("host-oom", "load_in_a_process_that_is_killed()"),
    ("device-oom", "import torch; raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')"),
    ("disk", "open('/dev/full', 'w').write('a' * 100000)"),
    ("disk", "import torch; torch.save(torch.ones(999999), '/dev/full')"),
    ("network", "import socket; socket.create_connection(('127.0.0.1', 1))"),
    ("network", "import socket; socket.getaddrinfo('no.such.host.invalid', 1)"),
    ("network", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:1/')"),
    ("network", "from torch import distributed as d; import datetime as t; s = t.timedelta(seconds=1); d.TCPStore('127.0.0.1', 0, 1, True, s).get('x')"),
    ("preemption", "import os; os.kill(os.getpid(), 15); __import__('signal').pause()"),
    ("time-limit", "import os; os.kill(os.getpid(), __import__('signal').SIGXCPU); __import__('signal').pause()"),
    ("crash", "raise ValueError('loss is nan')"),
    ("crash", "import ctypes; ctypes.string_at(0)"),
    ("crash", "import os; os.abort()"),
    ("crash", "f = lambda: f(); f()"),
    ("crash", "import subprocess; subprocess.run(['false'], check=True)"),
    ("unknown", "raise SystemExit(3)"),
    ("unknown", "import os; os.kill(os.getpid(), 9)"),
)  # fmt: skip


class Samples:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> None:
        os.kill(os.getpid(), 9)


def load_in_a_process_that_is_killed() -> None:
    from torch.utils.data import DataLoader

    list(DataLoader(Samples(), num_workers=1))


if __name__ == "__main__":
    from muster import worker

    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt < len(PROGRAMS):
        worker.step(attempt + 1)
        exec(PROGRAMS[attempt][1])
