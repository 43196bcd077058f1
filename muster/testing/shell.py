"""What the contract's tests do in another process: `python -m muster.testing.shell FACTORY VERB [ARGUMENT ...]`.

Several verbs are separated by `--`.

submit FILE CFG [STEP]   submits the app of a JSON file; killed by SIGKILL when it calls STEP
describe APP             prints the app's state
list CFG                 prints {id: state} as JSON
log APP ROLE INDEX       prints a replica's log
cancel APP | delete APP
"""

import json
import os
import pkgutil
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from muster.schedulers.adapter import PluginScheduler, load_app


def split_step(step: str) -> tuple[str, str]:
    """Return the owner of a function, and its name."""
    owner, _, name = step.rpartition("." if "." in step.partition(":")[2] else ":")
    return owner, name


def kill_at(step: str) -> None:
    """Replace a function of the submission, `package.module:function` or `...:Class.method`, by the process's end."""

    def die(*_args: Any, **_named: Any) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("SIGKILL returned")

    owner, name = split_step(step)
    setattr(pkgutil.resolve_name(owner), name, die)


def run(scheduler: PluginScheduler, verb: str, *arguments: str) -> None:
    """Do what the words say, and print the answer."""
    if verb == "submit":
        path, cfg, *steps = arguments
        for step in steps:
            kill_at(step)
        print(scheduler.submit(load_app(json.loads(Path(path).read_text())), json.loads(cfg)))
    elif verb == "describe":
        found = scheduler.describe(*arguments)
        print("none" if found is None else found.state.name)
    elif verb == "list":
        print(json.dumps({each.app_id: each.state.name for each in scheduler.list(json.loads(arguments[0]))}))
    elif verb == "log":
        app_id, role, index = arguments
        sys.stdout.writelines(scheduler.log_iter(app_id, role, int(index)))
    else:
        {"cancel": scheduler.cancel, "delete": scheduler.delete}[verb](*arguments)


def main(factory: str, *words: str) -> None:
    """Create the scheduler and run the verbs."""
    scheduler: PluginScheduler = pkgutil.resolve_name(factory)("contract")
    try:
        while words:
            end = words.index("--") if "--" in words else len(words)
            run(scheduler, *words[:end])
            words = words[end + 1 :]
    finally:
        scheduler.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
