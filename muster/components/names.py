"""Derives the names of a job as TorchX does: from `--name {experiment}/{run}`, and the role's name."""

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from muster.components.errors import ComponentError

DEFAULT_EXPERIMENT: Final = "default-experiment"
"""The experiment of a job whose --name has none. Source: torchx/components/structured_arg.py."""


@dataclass(frozen=True, kw_only=True)
class JobNames:
    """The names of a job."""

    experiment: str
    run: str
    """Also the AppDef's name."""
    role: str


def parse_names(name: str, *, script: str | None, module: str | None) -> JobNames:
    """Derive a job's names from `--name` and the program.

    Args:
        name: `{experiment}/{run}`, `{experiment}/`, `/{run}`, `{run}` or `/`. Defaults: `DEFAULT_EXPERIMENT`, and the
            script's or module's own name as the run.
        script: path of the main script. Exactly one of `script` and `module` must be given.
        module: dotted name of the main module.

    Raises:
        ComponentError: no program, two programs, or an invalid one.
    """
    role = _name_role(script, module)
    experiment, slash, run = name.partition("/")
    if not slash:
        experiment, run = "", name
    return JobNames(experiment=experiment or DEFAULT_EXPERIMENT, run=run or role, role=role)


def get_role_name(script: str | None, m: str | None) -> str:
    """Do as TorchX's function of the same name, which components of others call.

    Returns:
        The script's own name, or else the module's.

    Raises:
        ComponentError: neither was given, or the module's name is wrong.
    """
    return _name_role(script or None, None if script else m or None)


def _name_role(script: str | None, module: str | None) -> str:
    if (script is None) == (module is None):
        given = "neither was given" if script is None else f"both were given: --script {script!r} and -m {module!r}"
        raise ComponentError(f"give exactly one of --script and -m; {given}; for example: --script main.py")
    if script is not None:
        return _name_script(script)
    last = str(module).rpartition(".")[2]
    if not last or str(module).startswith("-"):
        raise ComponentError(f"-m {module!r} is not the dotted name of a module; for example: -m package.train")
    return last


def _name_script(script: str) -> str:
    if script.startswith("-"):
        raise ComponentError(f"--script {script!r} looks like an option; write ./{script} if it is a file")
    stem = PurePosixPath(script).stem
    if not stem:
        raise ComponentError(f"--script {script!r} is not the path of a file; for example: --script main.py")
    return stem
