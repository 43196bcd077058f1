"""The seam for schedulers: what an adapter is made of, for those of muster and for those of other packages.

A package registers its factory as an entry point of the group `torchx.schedulers`. If the factory makes a
`PluginScheduler`, the command `muster` finds it by the scheduler's name in an app handle. Its methods carry `run`,
`status`, `list`, `stop`, `checkpoint`, `pause`, `resume`, `stacks`, `exec`, `shell`, `resize`, `recover`, `delete` and
`prune`. The page *Write an adapter* builds one. `muster.testing` has the tests that each adapter must pass.

An adapter derives from one of three classes. Each does more than the one before:

| class                 | for replicas that                                                                           |
|---                    |---                                                                                          |
| `PluginScheduler`     | something else starts, watches and retries: a cluster, a batch system                       |
| `SupervisedScheduler` | a supervisor of muster on this machine owns: it starts them by a `ReplicaDriver`, retries,  |
|                       | resizes, ends them, and keeps the app's state in a folder                                   |
| `ProcessScheduler`    | are such processes, or programs here that stand for something elsewhere: its `ProcessDriver`|
|                       | writes and reads their logs                                                                 |

The names of `__all__` are stable: a release that changes one says so in the change log. From outside of muster, import
them from this package only: the modules that have them may change. `__init__.pyi` says which module has which name,
here and to type checkers. Each is loaded when it is first asked for, because supervisor processes, which load drivers,
must start fast. This package has `scheduler`, `supervised` and `process_scheduler` with the three classes, `properties`
(what a scheduler is like, and where schedulers are found), `agent_role` (from a role to commands and variables) and
`process_plan` (on to what a `ProcessDriver` starts). It also has `waiting_line` (what is said while somebody waits),
`status` and `log_position` (logs whose records have times). What is known of an app, the codes of reasons, and their
words are in `schedulers.wording`.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any, Final

_STUB: Final = Path(__file__).with_suffix(".pyi").read_text()
_MODULES: Final = {name: place for place, name in re.findall(r"^from (\S+) import (\w+) as", _STUB, re.MULTILINE)}
"""The module of each name."""

__all__ = sorted(_MODULES)  # noqa: PLE0605  # type checkers read the stub


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
