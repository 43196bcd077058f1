"""What tells the NVLink domain of a node, with a library that has NVML's interface and is built here."""

import http.client
import json
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from muster.agent.placement.segments import find_segment


@pytest.fixture
def fabric() -> Iterator[None]:
    """The C library reads the real environment."""
    os.environ["STAND_IN_GPUS"] = "0:0:1"
    yield
    for name in ("STAND_IN_GPUS", "STAND_IN_FABRIC"):
        os.environ.pop(name, None)


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ("3:7:ab", "abababab-abab-abab-abab-abababababab.7"),
        ("2:7:ab", "segment 2 of job 81"),  # in progress
        ("3:7:0", "segment 2 of job 81"),  # a GPU without a fabric
        (None, "segment 2 of job 81"),
    ],
)
def test_the_driver_goes_before_slurm(told: str | None, found: str, nvml: str, fabric: None) -> None:
    if told is not None:
        os.environ["STAND_IN_FABRIC"] = told
    slurm = {"SLURM_JOB_SEGMENT_SIZE": "4", "SLURM_NODEID": "11", "SLURM_JOB_ID": "81"}
    assert find_segment({"MUSTER_NVML": nvml, **slurm}) == found
    assert find_segment({"MUSTER_NVML": nvml, "MUSTER_SEGMENT": "rack 4", **slurm}) == "rack 4"


@pytest.mark.parametrize("size", ["0", "", "x", "-4"])
def test_a_block_that_is_none(size: str) -> None:
    assert find_segment({"MUSTER_NVML": "/none.so", "SLURM_JOB_SEGMENT_SIZE": size, "SLURM_NODEID": "1"}) == ""


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ({"metadata": {"labels": {"nvidia.com/gpu.clique": "aa-bb.1"}}}, "aa-bb.1"),
        ({"metadata": {"labels": {}}}, ""),
        ({"kind": "Status", "code": 403}, ""),
        ([], ""),
    ],
)
def test_the_label_of_the_node(answer: object, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Connection:
        def __init__(self, host: str, port: int, **_: object) -> None:
            asked.append(f"{host}:{port}")

        def request(self, verb: str, path: str, headers: dict[str, str]) -> None:
            asked.append(f"{verb} {path} {headers['Authorization']}")

        def getresponse(self) -> SimpleNamespace:
            return SimpleNamespace(read=lambda _limit: json.dumps(answer).encode())

        def close(self) -> None:
            pass

    monkeypatch.setattr(http.client, "HTTPSConnection", Connection)
    monkeypatch.setattr(ssl, "create_default_context", lambda cafile: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    (tmp_path / "token").write_text("abc")
    env = {"MUSTER_MACHINE_NAME": "gpu-7", "KUBERNETES_SERVICE_HOST": "10.0.0.1", "MUSTER_NVML": "/none.so"}
    assert find_segment(env, str(tmp_path)) == found
    assert asked == ["10.0.0.1:443", "GET /api/v1/nodes/gpu-7 Bearer abc"]
    assert find_segment(env, str(tmp_path / "none")) == ""
