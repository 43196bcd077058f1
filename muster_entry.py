"""What the installed commands and TorchX begin with: one line where another package hides `muster`.

A folder `muster` on PYTHONPATH, or beside the program, comes before an installed package of that name. No line of the
package can say so, and the interpreter only says that `muster.agent` does not exist. So entry points name this module.
"""

import importlib
import importlib.util
import os
import sys

_COMMANDS = {
    "run_command": "muster.cli.commands:main",
    "run_agent": "muster.agent.__main__:main",
}
SCHEDULERS = {
    "local_cwd": "muster.schedulers.local:create_scheduler",
    "detached": "muster.schedulers.local:create_detached_scheduler",
    "local_docker": "muster.schedulers.docker:create_scheduler",
    "docker": "muster.schedulers.docker:create_detached_scheduler",
    "kubernetes": "muster.schedulers.kubernetes:create_scheduler",
    "ssh": "muster.schedulers.ssh:create_scheduler",
    "slurm": "muster.schedulers.slurm:create_scheduler",
    "held": "muster.schedulers.held:create_scheduler",
    "local_held": "muster.schedulers.held:create_attached_scheduler",
}
OF_TORCHX = {  # its own, registered again
    "slurm_torchx": "muster.schedulers.runner.builtins:create_slurm",
    "kubernetes_mcad": "muster.schedulers.runner.builtins:create_kubernetes_mcad",
    "aws_batch": "muster.schedulers.runner.builtins:create_aws_batch",
    "aws_sagemaker": "muster.schedulers.runner.builtins:create_aws_sagemaker",
    "gcp_batch": "muster.schedulers.runner.builtins:create_gcp_batch",
    "ray": "muster.schedulers.runner.builtins:create_ray",
    "lsf": "muster.schedulers.runner.builtins:create_lsf",
}


def __getattr__(name: str) -> object:
    """Load what an entry point names.

    Raises:
        SystemExit: another package hides muster; a traceback of TorchX's would say less.
    """
    target = {**_COMMANDS, **SCHEDULERS, **OF_TORCHX}.get(name)
    if target is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    other = find_other()
    if other is not None:
        line = f"{other} hides the package of torchx-muster, which has the same name"
        print(f"muster: {line}: rename it, or take its folder off PYTHONPATH", file=sys.stderr)
        raise SystemExit(2)
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def find_other() -> "str | None":
    """The folder or file of a package `muster` that is found before ours; None: ours is found."""
    try:
        spec = importlib.util.find_spec("muster")
    except ValueError:  # it is in `sys.modules` and says nothing of itself
        return None
    if spec is None:
        return None  # the import will say so
    if spec.origin is None:  # a folder without __init__.py
        return next(iter(spec.submodule_search_locations or ()), None)
    folder, name = os.path.split(spec.origin)
    if name != "__init__.py":
        return spec.origin
    is_ours = os.path.exists(os.path.join(folder, "_shared/contract.py"))
    return None if is_ours or ".zip" in folder else folder
