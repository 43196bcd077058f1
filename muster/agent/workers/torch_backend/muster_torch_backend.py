# ruff: noqa: INP001  # a folder on sys.path of its own, no package
"""What `import torch` calls in the Python programs below a `--no-python` worker: installs `workers.program`'s hook.

While the agent watches for hangs, the hook also has the program write its stacks on the agent's signal. This folder is
on the programs' PYTHONPATH, and the metadata beside this file name it to torch (2.5 and later). A failure here leaves
the program unchanged; otherwise `import torch` would fail.
"""

import os
import sys

_WATCHED = "MUSTER_WATCHED"
"""`_shared.contract.Env.WATCHED`."""
_STACK_FILE = "MUSTER_STACK_FILE"
"""`_shared.contract.Env.STACK_FILE`."""
_GROUPS_MODULE = "torch.distributed.distributed_c10d"


def hook() -> None:
    """Have `hooks.groups` run when the program initialises a process group, `hooks.steps` when an optimizer steps."""
    if _WATCHED not in os.environ or _is_hooked():
        return
    try:
        path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "program.py")
        loader = sys.modules["_frozen_importlib_external"].SourceFileLoader("program", path)
        names = {"__name__": "program", "__file__": path, "__loader__": loader}
        exec(loader.get_code("program"), names)  # noqa: S102  # our own code
        names["hook_torch"]()
        if os.environ[_WATCHED] == "1":
            names["enable_faulthandler"](os.environ.get(_STACK_FILE, ""))
    except Exception:  # noqa: BLE001, S110  # no sources, another program.py: all goes on without it
        pass


def _is_hooked() -> bool:
    """Return whether the hook is installed: in a Python worker, or below an agent that a command has started."""
    groups = sys.modules.get(_GROUPS_MODULE)
    if groups is None:
        return any(type(each).__name__ == "_HookFinder" for each in sys.meta_path)
    return hasattr(getattr(groups, "set_pytorch_distributed_envs_from_justknobs", None), _WATCHED)
