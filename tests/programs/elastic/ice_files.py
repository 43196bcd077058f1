"""Starts functions as ice-learn's `elastic_multiprocessing` is called, and prints results and files; D is the folder."""

import os
import sys
import tempfile
import threading
from pathlib import Path

from muster.elastic import MultiprocessContext, launcher, start_processes

if __name__ == "__main__":  # workers need none of it: it imports torch, which takes them a second
    from muster.elastic import Std

    launcher._PRELOADED = ()

ALIKE = {0: {}, 1: {}}


def add(a, b):
    print("out", a)
    print("err", b, file=sys.stderr)
    return a + b


def fail(a, b):
    print("out", a)
    if b == "d":
        raise ValueError("no data")


def build_events():
    events = {"trigger_clear": threading.Event(), "cleared": threading.Event()}
    events["cleared"].set()
    return events


def show(context, folder):
    result = context.wait(120)
    context.close()
    written = [str(path.relative_to(folder)) for path in Path(folder).rglob("*.*")]
    if result.is_failed():  # the other rank may be ended before it writes anything
        written = [path for path in written if path.startswith("1")]
    facts = (result.is_failed(), result.return_values, result.stdouts, result.stderrs)
    print(str(facts).replace(folder, "D"), sorted(written))
    for rank, failure in result.failures.items():
        file = failure.error_file.replace(folder, "D")
        print(rank, failure.exitcode, file, failure.message["message"], failure.signal_name())


def main():
    for function, redirects, tee in (
        (add, Std.ALL, Std.NONE),
        (add, Std.NONE, {0: Std.OUT, 1: Std.ALL}),
        (add, {1: Std.ERR}, Std.NONE),
        (fail, Std.ALL, Std.NONE),
    ):
        folder, args = tempfile.mkdtemp(), {0: ("a", "b"), 1: ("c", "d")}
        envs = {rank: dict(env) for rank, env in ALIKE.items()}
        show(start_processes("trainer", function, args, envs, folder, "spawn", redirects, tee, build_events()), folder)
    folder = tempfile.mkdtemp()
    outs, errs, errors = ({rank: f"{folder}/{rank}.{name}" for rank in ALIKE} for name in ("out", "err", "json"))
    envs = {rank: {"TORCHELASTIC_ERROR_FILE": path} for rank, path in errors.items()}
    words = ("trainer", add, {0: ("a", "b"), 1: ("c", "d")}, envs, outs, errs, {}, {}, errors, "spawn", build_events())
    context = MultiprocessContext(*words)
    context.start()
    show(context, folder)
    for given in (os.path.join(folder, "none"), folder):
        try:
            start_processes("trainer", add, {0: ("a", "b")}, {0: {}}, given, progbar_events=build_events())
        except (OSError, RuntimeError) as error:
            print(type(error).__name__, str(error).replace(folder, "D"))


if __name__ == "__main__":
    main()
