"""An etcd for those tests that need one."""

import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import find_free_port, wait_until


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    """A real etcd that speaks the v2 API; its client endpoint."""
    pytest.importorskip("etcd", reason="python-etcd is not installed")
    binary = shutil.which("etcd")
    if binary is None:
        message = "etcd-server is not installed"
        if "etcd" in os.environ.get("MUSTER_REQUIRE", "").split(","):
            pytest.fail(message)
        pytest.skip(message)
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


def _is_healthy(client: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{client}/health", timeout=1) as answer:
            return b"true" in answer.read()
    except (urllib.error.URLError, OSError):
        return False
