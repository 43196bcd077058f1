"""Functions as workers, for programs that start a job from Python.

    results = launch_function(train, 0.1, flags=["--standalone", "--nproc-per-node", "4", "--max-restarts", "3"])
    results[0]  # what rank 0 returned

The agent runs as a process of its own, as always: a program that starts a job keeps its signal handlers and children.
In the workers this file is the program: it imports the caller's `__main__` the way multiprocessing's spawn does, calls
the function and leaves its result in a file. Function, arguments and results must be picklable, whatever the method.
"""

import json
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from muster.agent.errors import MusterError, UsageError

_STARTS = {"spawn": "cold", "fork": "warm", "forkserver": "warm"}


class FunctionFailed(MusterError):
    """The job did not succeed; the agent has printed the report. `str()` has the root cause."""

    def __init__(self, line: str, agent_exit_code: int) -> None:
        super().__init__(line)
        self.agent_exit_code = agent_exit_code
        """As of `_contract.ExitCode`; negative: the agent itself was ended by that signal."""


def launch_function(
    function: Callable[..., Any], *args: Any, flags: Sequence[str] = (), start_method: str = "spawn"
) -> dict[int, Any]:
    """Run `function(*args)` in every worker of this node; blocks until the job is over.

    Args:
        function: importable by its name, from a module or from the caller's `__main__`.
        args: its arguments, the same in every worker.
        flags: flags of the agent's command line.
        start_method: "spawn": an interpreter each. "fork" or "forkserver": forked from a process that has imported
            torch, if the caller has.

    Returns:
        What the function returned, by global rank; the ranks of this node.

    Raises:
        UsageError: an unknown start method, or arguments that cannot be pickled.
        FunctionFailed: the job did not succeed.
    """
    if start_method not in _STARTS:
        raise UsageError(f"start_method={start_method!r}: allowed are {', '.join(_STARTS)}")
    with tempfile.TemporaryDirectory(prefix="muster_function_") as folder:
        payload = Path(folder, "payload")
        payload.write_bytes(_pack(function, args))
        own = ["--start", _STARTS[start_method], *(("--preload", "torch") if "torch" in sys.modules else ())]
        # Files, not modules: with -m a types.py in the working directory would be imported, see `agent/entry.py`.
        agent = str(Path(__file__).parents[1] / "entry.py")
        command = [sys.executable, agent, *own, *flags, __file__, str(payload)]
        error_file = Path(folder, "error.json")
        _run_agent(command, error_file)
        return {int(path.suffix[1:]): pickle.loads(path.read_bytes()) for path in Path(folder).glob("result.*")}  # noqa: S301  # our own workers wrote it


def _pack(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    preparation = spawn.get_preparation_data("worker")
    del preparation["authkey"]  # may not be pickled outside a spawn, and no worker talks to the caller's children
    try:
        return pickle.dumps((preparation, pickle.dumps((function, args))))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(f"cannot send {function!r} and its arguments to workers: {error}") from error


def _run_agent(command: list[str], error_file: Path) -> None:
    import subprocess

    code = subprocess.run(
        command, env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(error_file)}, check=False
    ).returncode
    if code == 0:
        return
    cause = f"the agent ended with exit code {code}"
    if error_file.exists():
        message = json.loads(error_file.read_text(encoding="utf-8"))["message"]
        cause = message["message"] if isinstance(message, dict) else str(message)
    raise FunctionFailed(cause, code)


def call(payload: str) -> None:
    """In a worker: call the function, leave its result beside the payload. What it raises is the worker's failure."""
    preparation, call_data = pickle.loads(Path(payload).read_bytes())  # noqa: S301  # the launching program wrote it
    spawn.prepare(preparation)
    function, args = pickle.loads(call_data)  # noqa: S301  # likewise; only now is its module importable
    result = function(*args)
    path = Path(payload).with_name(f"result.{os.environ['RANK']}")
    unfinished = path.with_name(f"unfinished.{os.environ['RANK']}")
    unfinished.write_bytes(pickle.dumps(result))
    unfinished.replace(path)


if __name__ == "__main__":
    call(sys.argv[1])
