"""What a submission to `local_cwd` and `detached` needs: the facts of this machine, and a check of the programs.

Only a submission loads it: `torchx list`, `status` and `log` start without it.
"""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import replace

from torchx.specs import AppDef

import muster
from muster._shared.contract import AGENT_MODULE
from muster._shared.programs import explain_missing
from muster.schedulers.agent_command import find_program, is_agent_role
from muster.schedulers.errors import SchedulerError
from muster.schedulers.gpus import list_devices, needs_sharing
from muster.schedulers.local.options import LocalOptions
from muster.schedulers.local.request import Host, LocalRequest, build_request, list_device_requests
from muster.schedulers.naming import make_secret
from muster.schedulers.runner.live_lines import draws_bars
from muster.schedulers.supervision.app_folder import AppSpec


def prepare_request(app: AppDef, options: LocalOptions, *, name: str, folder: str) -> LocalRequest:
    """Build the request of an app on this machine, with a token of its own.

    Args:
        app: as given. It is not changed.
        options: of the submission.
        name: the app's id.
        folder: absolute path of the app's future folder.

    Raises:
        SchedulerError: the request cannot be built. It is one line.
    """
    host = _read_host(app, options)
    return build_request(app, options, name=name, token=make_secret(), folder=folder, host=host)


def build_spec(request: LocalRequest, scheduler: str) -> AppSpec:
    """Build what the app's supervisor starts from.

    Args:
        request: as `prepare_request` has built it.
        scheduler: the scheduler's name.

    Raises:
        SchedulerError: a script or module does not exist.
    """
    check_programs(request.spec)
    return replace(request.spec, scheduler=scheduler)


def check_programs(spec: AppSpec, *, scripts_only: bool = False) -> None:
    """Refuse a script or module that does not exist: each worker of each node would say so otherwise."""
    for role, (plan, *_) in spec.details["replicas"].items():
        python, *words = plan["command"]
        program = find_program(["-m", AGENT_MODULE, *words[1:]]) if plan["runs_agent"] else None
        if program is None or "PYTHON_EXEC" in plan["env"] or not os.path.exists(python):
            continue  # no program, or another message is due
        # Others may import other modules.
        if program[0] == "module" and (scripts_only or python != sys.executable or "PYTHONPATH" in plan["env"]):
            continue
        problem = explain_missing(*program, plan["cwd"])
        if problem is not None:
            raise SchedulerError(f"role {role}: {problem}")


def _read_host(app: AppDef, options: LocalOptions) -> Host:
    """Return the facts on which the request depends besides its arguments.

    No other place reads the environment.
    """
    divides = options.auto_set_cuda_visible_devices
    if divides is None:
        divides = needs_sharing(list_device_requests(app, options))
    runs_agents = any(is_agent_role(role) for role in app.roles)
    python = find_interpreter(os.environ, sys.executable) if runs_agents else sys.executable
    return Host(
        cwd=os.getcwd(),
        python=python,
        has_muster=not runs_agents or has_same_muster(python),
        draws_bars=not options.detach and draws_bars(os.environ),
        devices=list_devices(os.environ) if divides else (),
        env=dict(os.environ),
    )


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
