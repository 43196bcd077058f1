"""Starts a job from Python, with functions of this file."""

import os
import sys

from muster.agent.errors import UsageError
from muster.agent.workers.function import FunctionFailed, launch_function


class Pair:
    def __init__(self, left, right):
        self.left, self.right = left, right


def add(pair):
    return Pair(pair.left + pair.right, int(os.environ["RANK"]))


def fail():
    raise ValueError("the text")


def main():
    flags = ["--standalone", "--nproc-per-node", "2"]
    for method in ("spawn", "fork", "forkserver"):
        results = launch_function(add, Pair(1, 2), flags=flags, start_method=method)
        print(method, {rank: (type(pair).__name__, pair.left, pair.right) for rank, pair in sorted(results.items())})
    try:
        launch_function(fail, flags=flags)
    except FunctionFailed as error:
        print("failed", error, error.agent_exit_code)
    for bad in (lambda: launch_function(lambda: 0), lambda: launch_function(fail, start_method="thread")):
        try:
            bad()
        except UsageError as error:
            print("refused", str(error).partition(" at 0x")[0])
    sys.stdout.flush()


if __name__ == "__main__":
    main()
