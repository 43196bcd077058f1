"""`python -m muster.agent`, `muster-agent`, and the zip that travels with a job: the guard, and the agent below it.

Only what the guard needs is imported before the fork, because the guard runs as long as the job, on every node.
"""

import os
import sys

TYPE_CHECKING = False  # `typing` is slow to import

if sys.path and os.path.abspath(sys.path[0]) == os.getcwd():
    # `-m` puts the working directory first, where a selectors.py would shadow the standard library. Our package is
    # already imported.
    del sys.path[0]

if TYPE_CHECKING:
    from muster._shared.guard import GuardLease

_WORKER_FLAG = "--muster-worker"
"""As in `workers.program`, which is imported only for this flag. In the bundle, cold workers start through here."""

_REPLICA_FLAG = "--replica"
"""As in `schedulers.agent_command`."""

_ASK = "ask"
"""The first word of a worker's question. A program of that name is started as `./ask`."""


def main(argv: list[str] | None = None) -> int:
    """Run an agent under its guard; return the exit code (see `_shared.contract.ExitCode`)."""
    args = sys.argv[1:] if argv is None else argv
    if args[:1] == [_WORKER_FLAG]:
        from muster.agent.workers import program

        program.main(args[1:])
        return 0
    if args[:1] == [_ASK]:
        from muster.agent import ask

        return ask.main(args[1:])
    if args[:1] == [_REPLICA_FLAG]:
        from muster._shared import role_command

        return role_command.main(args[1:])
    from muster._shared import guard
    from muster._shared.contract import ADOPTED_FLAG, DRIVEN_FLAG, HOLD_FLAG, WAITING_FLAG

    if args[:1] == [DRIVEN_FLAG]:
        from muster.agent import driven

        return driven.main(args[1:])
    if args[:1] == [ADOPTED_FLAG]:
        from muster.agent import driven

        return driven.main_adopted(args[1:])
    if args[:1] == [WAITING_FLAG]:
        from muster.agent.hold import waiting

        return waiting.main(args[1:])
    if args[:1] == [HOLD_FLAG]:
        return guard.run_guarded(lambda _lease: _hold(args[1:]), reported_as="the holder of this node")
    return guard.run_guarded(lambda lease: _run_agent(args, lease), reported_as="the agent of this node")


def _hold(args: list[str]) -> int:
    from muster.agent.hold import holder

    return holder.hold(args)


def _run_agent(args: list[str], lease: "GuardLease") -> int:
    from muster.agent.launch import run_agent

    return run_agent(args, os.environ, lease)


if __name__ == "__main__":
    sys.exit(main())
