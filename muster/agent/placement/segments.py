"""Finds the NVLink domain of this node, for `--rank-order segment`. It is loaded only with that flag.

Nodes of one domain reach each other faster than others. There are four sources, of which the first with a value counts,
in this order. `MUSTER_SEGMENT` is the first. The second is the UUID of the cluster and the clique that the driver
reports for the first GPU, from which NVIDIA's operator makes the label. The third is the label of the node on
Kubernetes, if the pod's service account may read nodes. The fourth is the block of `SLURM_JOB_SEGMENT_SIZE` nodes that
contains the node.

Source: nvml.h of API version 13 (nvmlGpuFabricInfo_t); sbatch(1), `--segment`. It was never tested on a device.
"""

import contextlib
import ctypes
import os
from collections.abc import Mapping
from typing import Final

from muster._shared.contract import Env
from muster._shared.foreign_files import parse_json
from muster._shared.processes import find_nvml
from muster.agent.runtime.loop import run_limited

LABEL: Final = "nvidia.com/gpu.clique"
"""The value is the UUID of the cluster, a point, and the clique."""
_ACCOUNT_DIR: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
_ANSWER_S: Final = 2.0
_DRIVER_S: Final = 10.0
_ANSWER_BYTES: Final = 1 << 20
_SUCCESS: Final = 0
_COMPLETED: Final = 3
"""NVML_GPU_FABRIC_STATE_COMPLETED."""


class _Fabric(ctypes.Structure):
    """nvmlGpuFabricInfo_t."""

    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


def find_segment(environ: Mapping[str, str], account_dir: str = _ACCOUNT_DIR) -> str:
    """Return the name of the node's domain; "" if nothing tells it.

    It may take `_DRIVER_S`, and `_ANSWER_S` for the label.

    Args:
        environ: the agent's.
        account_dir: where a pod has the token of its service account.
    """
    return (
        environ.get(Env.SEGMENT, "")
        or _find_fabric(find_nvml(environ))
        or _read_label(environ, account_dir)
        or _find_block(environ)
    )


def _find_fabric(library: str | None) -> str:
    """Ask the driver within a limit, because the driver of a hanging GPU may not answer."""
    found: list[str] = []
    if library is not None:
        with contextlib.suppress(RuntimeError):  # no threads left
            run_limited([lambda: found.append(_read_fabric(library))], _DRIVER_S)
    return found[0] if found else ""


def _read_fabric(library: str) -> str:
    try:
        nvml = ctypes.CDLL(library)
        if nvml.nvmlInit_v2() != _SUCCESS:
            return ""
    except (OSError, AttributeError):  # none, or another library
        return ""
    try:
        handle, fabric = ctypes.c_void_p(), _Fabric()
        code = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(0), ctypes.byref(handle))
        if code != _SUCCESS or nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(fabric)) != _SUCCESS:
            return ""
    except AttributeError:  # a driver before 535
        return ""
    finally:
        nvml.nvmlShutdown()
    cluster = bytes(fabric.cluster)
    if fabric.state != _COMPLETED or fabric.status != _SUCCESS or not any(cluster):
        return ""
    digits = cluster.hex()
    uuid = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    return f"{uuid}.{fabric.clique}"


def _read_label(environ: Mapping[str, str], account_dir: str) -> str:
    node, host = environ.get(Env.MACHINE_NAME), environ.get("KUBERNETES_SERVICE_HOST")
    if not node or not host or not os.path.exists(f"{account_dir}/token"):
        return ""
    import http.client
    import ssl

    try:
        with open(f"{account_dir}/token", encoding="ascii") as file:
            headers = {"Authorization": f"Bearer {file.read().strip()}", "Accept": "application/json"}
        context = ssl.create_default_context(cafile=f"{account_dir}/ca.crt")
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # often lacks extensions
        port = int(environ.get("KUBERNETES_SERVICE_PORT", "443"))
        connection = http.client.HTTPSConnection(host, port, timeout=_ANSWER_S, context=context)
        try:
            connection.request("GET", f"/api/v1/nodes/{node}", headers=headers)
            found = parse_json(connection.getresponse().read(_ANSWER_BYTES))
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException):
        return ""
    metadata = found.get("metadata") if isinstance(found, dict) else None
    labels = metadata.get("labels") if isinstance(metadata, dict) else None
    return str(labels.get(LABEL, ""))[:200] if isinstance(labels, dict) else ""


def _find_block(environ: Mapping[str, str]) -> str:
    size, node = environ.get("SLURM_JOB_SEGMENT_SIZE", ""), environ.get("SLURM_NODEID", "")
    if not (size.isdecimal() and node.isdecimal() and int(size)):
        return ""
    return f"segment {int(node) // int(size)} of job {environ.get('SLURM_JOB_ID', '')}"
