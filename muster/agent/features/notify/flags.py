"""The flag: the command to run."""

from typing import Final

from muster.agent.cli.command_line import Invocation
from muster.agent.cli.flag_table import Flag
from muster.agent.errors import UsageError

FLAGS: Final = (
    Flag(
        name="notify",
        is_free=True,
        metavar="CMD",
        ours=True,
        has_variable=False,
        text="A command that one node runs when the job has failed, hangs, is preempted, has ended or was stopped, "
        "once for each. It is split into words as a shell does, but no shell runs. It reads the report on its "
        "standard input, and has MUSTER_NOTIFY_EVENT, _REASON, _RUN_ID, _APP, _STEP, _ATTEMPT, _EXIT_CODE, "
        "_LOG_DIR and _HOST as far as they are known. It is killed after 30 s, or 3 s after a signal has "
        "ended the job. Its exit code has no effect.",
    ),
)


def read(invocation: Invocation) -> tuple[str, ...]:
    """Return the command's words. Refuse one that does not exist, because it is too late when it is needed."""
    text = invocation.values.text("notify") or ""
    import shlex
    from shutil import which

    try:
        argv = shlex.split(text)
    except ValueError as error:
        raise invocation.values.build_error(
            "notify", f"words as in a shell, but there is {str(error).lower()}"
        ) from error
    if not argv:
        raise invocation.values.build_error("notify", "a command")
    if which(argv[0], path=invocation.environ.get("PATH")) is None:
        raise UsageError(f"--notify {text!r}: there is no program {argv[0]!r} on this node")
    return tuple(argv)
