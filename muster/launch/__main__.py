"""`python -m muster.launch`: this process becomes the guard, as with `python -m muster.run`."""

import sys
import warnings

from muster import run
from muster._shared.contract import ExitCode, print_line
from muster.agent.__main__ import main as run_agent
from muster.launch import DEPRECATED, check_args, parse_args


def main() -> int:
    """Run one node of a job. Return the exit code (see `_shared.contract.ExitCode`)."""
    warnings.warn(DEPRECATED, category=FutureWarning, stacklevel=2)
    args = parse_args(None)
    try:
        check_args(args)
    except ValueError as error:
        print_line(f"muster: {error}")
        return ExitCode.USAGE
    return run_agent(run.build_flags(args))


if __name__ == "__main__":
    sys.exit(main())
