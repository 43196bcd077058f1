"""Finds the Python that runs the agents, and whether it has muster."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping

import muster
from muster.schedulers.errors import SchedulerError

_PROBE = "import sys; sys.path[:] = [path for path in sys.path if path]; import muster; print(muster.__version__)"


def find_interpreter(env: Mapping[str, str], own: str) -> str:
    """Return the Python of the user's environment: of VIRTUAL_ENV, else of CONDA_PREFIX, else the one that runs TorchX.

    Args:
        env: the caller's environment.
        own: `sys.executable`.

    Raises:
        SchedulerError: that environment has no Python.
    """
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if env.get(name):
            candidates = [os.path.join(env[name], "bin", python) for python in ("python3", "python")]
            found = next((path for path in candidates if os.access(path, os.X_OK)), None)
            if found is None:
                raise SchedulerError(f"{name}={env[name]} has no bin/python3; correct or unset {name}")
            return found
    return own


def has_same_muster(python: str) -> bool:
    """Return whether a new interpreter finds this version of muster without its working directory."""
    return _is_installed_beside(python) or _finds_muster(python)


def _is_installed_beside(python: str) -> bool:
    """Return whether the interpreter is our own and muster is in its site-packages.

    This is the usual case, and starting an interpreter to find out takes a third of the time of a submission.
    """
    own = sys.executable
    # The folder too: virtual environments share one file.
    is_own = os.path.dirname(python) == os.path.dirname(own) and os.path.realpath(python) == os.path.realpath(own)
    started_alike = not (sys.flags.ignore_environment or sys.flags.no_site)
    root = os.path.dirname(os.path.dirname(muster.__file__))
    return is_own and started_alike and root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


def _finds_muster(python: str) -> bool:
    try:
        run = subprocess.run(
            [python, "-c", _PROBE],
            capture_output=True,
            text=True,
            cwd="/",
            timeout=60,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return run.returncode == 0 and run.stdout.strip() == muster.__version__
