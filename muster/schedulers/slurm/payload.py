"""The zip that each node runs: `node` and what it imports. Without a shared folder it also has the app's own files."""

import base64
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from muster.schedulers.bundle import strip_source
from muster.schedulers.slurm.node import FILES_DIR

NAME: Final = "node.zip"
NOT_SENT: Final = 97
"""Exit code of the job's script if it cannot write the zip to the nodes. Programs rarely use it."""
SCRIPT_LIMIT_BYTES: Final = 4_000_000
"""Slurm's default limit of a script (`max_script_size`) is 4 MiB."""

_PACKAGE: Final = Path(__file__).resolve().parents[2]
_MODULES: Final = (
    *("__init__", "schedulers/__init__", "schedulers/failure_report", "schedulers/naming"),
    *("schedulers/node_program/__init__", "schedulers/node_program/output_pipes"),
    *("schedulers/processes/" + name for name in ("__init__", "agent_files", "capture", "driver", "launch", "plan")),
    *("schedulers/slurm/" + name for name in ("hosts", "node")),
    *("schedulers/supervision/" + name for name in ("__init__", "app_folder", "decisions", "driver")),
    *("schedulers/supervision/" + name for name in ("events", "machine", "state", "supervisor")),
    *("schedulers/wording/" + name for name in ("__init__", "reasons", "slurm_names", "words")),
)
_MAIN: Final = """\
import signal, sys

# Kept until `watch_signals`: Slurm may send them in a job's first second.
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP))
if sys.version_info < (3, 10):
    sys.exit("muster: needs Python 3.10 or newer, but %s is Python %d.%d" % ((sys.executable,) + sys.version_info[:2]))
from muster.schedulers.slurm.node import main

sys.exit(main(sys.argv))
"""


def build_payload(files: Mapping[str, bytes]) -> bytes:
    """Pack what a node runs.

    Args:
        files: of the app's state folder, by name: for nodes without the shared folder.
    """
    shared = sorted((_PACKAGE / "_shared").rglob("*.py"))
    paths = [*(_PACKAGE / f"{name}.py" for name in _MODULES), *shared]
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__main__.py", _MAIN)
        archive.writestr("muster/schedulers/slurm/__init__.py", "")  # nodes need no entry point
        for path in paths:
            archive.writestr(f"muster/{path.relative_to(_PACKAGE).as_posix()}", strip_source(path.read_text()))
        for name, content in files.items():
            archive.writestr(f"{FILES_DIR}{name}", content)
    return packed.getvalue()


def encode_payload(payload: bytes) -> str:
    """Encode a payload as lines of text for a script."""
    return base64.encodebytes(payload).decode("ascii")
