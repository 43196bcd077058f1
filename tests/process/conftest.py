"""An etcd and GPUs for those tests that need them, and both command lines in the process of the test."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import find_free_port, skip_or_fail, wait_until


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    """A real etcd that speaks the v2 API; its client endpoint."""
    pytest.importorskip("etcd", reason="python-etcd is not installed")
    binary = shutil.which("etcd")
    if binary is None:
        skip_or_fail("etcd", "etcd-server is not installed")
    client, peer = (f"127.0.0.1:{find_free_port()}" for _ in range(2))
    command = [
        binary,
        "--enable-v2",
        "--data-dir",
        str(tmp_path / "etcd"),
        "--listen-client-urls",
        f"http://{client}",
        "--advertise-client-urls",
        f"http://{client}",
        "--listen-peer-urls",
        f"http://{peer}",
        "--initial-advertise-peer-urls",
        f"http://{peer}",
        "--initial-cluster",
        f"default=http://{peer}",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: process.poll() is not None or _is_healthy(client), what="etcd is healthy")
        assert process.poll() is None, "etcd ended"
        yield client
    finally:
        process.kill()
        process.wait()


LIST_GPUS = """
import json, torch
properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
print(json.dumps([f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0" for p in properties]))
"""


@pytest.fixture(scope="session")
def gpus() -> list[str]:
    """PCI addresses, in CUDA's order, from another process: this one must not hold a CUDA context."""
    reason = "" if Path("/dev/nvidiactl").exists() else "no NVIDIA driver"
    found: list[str] = []
    if not reason:
        env = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        done = subprocess.run([sys.executable, "-c", LIST_GPUS], env=env, capture_output=True, text=True)
        found = json.loads(done.stdout) if done.returncode == 0 else []
        reason = "" if found else f"torch.cuda finds no GPU: {done.stderr.strip()[-300:]}"
    if reason:
        skip_or_fail("gpu", reason)
    return found


def _is_healthy(client: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{client}/health", timeout=1) as answer:
            return b"true" in answer.read()
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state folder of the test's own, whose folder is the working directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def torchx(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Run `torchx ...` in this process: its exit code and what it prints. A process of its own takes seconds."""

    def call(*words: str) -> tuple[int, str, str]:
        from torchx.cli import argparse_util
        from torchx.cli.main import main

        for kind in list(vars(argparse_util).values()):  # 0.7 keeps what this process has had before
            getattr(kind, "called_args", set()).clear()

        code: object = 0
        handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)}
        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patch.setattr(logging.getLogger(), "handlers", [])  # it makes its own
            patch.setattr(sys, "excepthook", sys.__excepthook__)
            patch.setattr(threading, "excepthook", threading.__excepthook__)
            try:
                main(list(words))
            except SystemExit as end:
                code = end.code
            except Exception:  # what the interpreter does with it
                sys.excepthook(*sys.exc_info())
                code = 1
        for each, handler in handlers.items():
            signal.signal(each, handler)
        out, err = capfd.readouterr()
        return code if isinstance(code, int) else int(code is not None), out, err

    return call


@pytest.fixture
def muster(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run `muster ...` in this process: its exit code and what it prints."""

    def call(*words: str) -> tuple[int, str, str]:
        from muster.cli.commands import main

        capfd.readouterr()
        code = main(list(words))
        out, err = capfd.readouterr()
        return code, out, err

    return call
