"""`muster-agent ask stop --step I [--stride S]`: `muster.worker.should_stop` for workers without Python.

`ask job` is what `muster` runs on a node, see `control.client`.

A process is started per step, so it imports little. What the rank has asked before is in its slot.
"""

import os
import sys
from collections.abc import Sequence

GO_ON, MISUSE, STOP_NOW = 0, 2, 10
"""Exit codes."""

USAGE = """\
usage: muster-agent ask stop --step I [--stride S]

A worker asks whether the job ends at step I. Ask at the same steps on every rank, after the work of the step; I must
rise within an attempt. While the nodes agree on the last step, the question waits.

  --step I     the step, 0 or more
  --stride S   this rank asks about every S-th step (default: the distance of its last two questions)

exit code: 0 go on (also outside a muster job), 10 save and stop now, 2 wrong usage
"""


class _Misuse(Exception):
    """One line for the user."""


def main(args: Sequence[str]) -> int:
    """Answer one question, and return the exit code."""
    if any(each in ("-h", "--help") for each in args):
        sys.stdout.write(USAGE)
        return GO_ON
    if args[:1] == ["job"]:
        from muster.agent.control import client

        return client.main(args[1:])
    try:
        step, stride = _parse(args)
    except _Misuse as error:
        from muster._shared.contract import print_line

        print_line(f"muster: {error}\n{USAGE}")
        return MISUSE
    from muster._shared.contract import Env

    if not os.environ.get(Env.STATUS_PAGE):
        return GO_ON
    from muster import worker

    return STOP_NOW if worker.ask_once(step, stride) else GO_ON


def _parse(args: Sequence[str]) -> tuple[int, int | None]:
    if args[:1] != ["stop"]:
        what = repr(args[0]) if args else "nothing"
        raise _Misuse(f"ask {what}: the question must be stop")
    values: dict[str, str] = {}
    remaining = list(args[1:])
    while remaining:
        name, equals, text = remaining.pop(0).partition("=")
        if name not in ("--step", "--stride"):
            raise _Misuse(f"ask stop: unknown argument {name!r}")
        if not equals:
            if not remaining:
                raise _Misuse(f"ask stop: {name} needs a value")
            text = remaining.pop(0)
        values[name] = text
    if "--step" not in values:
        raise _Misuse("ask stop: --step is missing")
    stride = _parse_number("--stride", values["--stride"], 1) if "--stride" in values else None
    return _parse_number("--step", values["--step"], 0), stride


def _parse_number(name: str, text: str, least: int) -> int:
    from muster._shared.contract import parse_digits
    from muster._shared.layouts import StatusPageLayout

    most = StatusPageLayout.MAX_STEP
    number = parse_digits(text, most)
    if number is None or number < least:
        raise _Misuse(f"ask stop {name} {text!r}: must be a whole number, {least} to {most}")
    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
