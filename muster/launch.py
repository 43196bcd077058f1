"""torch.distributed.launch's module, which torch has deprecated: `muster.run`, and `--local-rank` for scripts.

    python -m muster.launch --nproc-per-node=4 train.py     # every script gets --local-rank=N
    python -m muster.launch --use-env --nproc-per-node=4 train.py

Source: torch/distributed/launch.py of torch 2.13.
"""

import sys
import warnings
from argparse import Namespace
from collections.abc import Sequence

from muster import run
from muster._shared.contract import ExitCode, print_line

DEPRECATED = (
    "muster.launch stands in for torch.distributed.launch, which is deprecated\n"
    "and will be removed from torch in future. Use muster-agent or muster.run.\n"
    "Note that --use-env is set by default there.\n"
    "If your script expects `--local-rank` argument to be set, please\n"
    "change it to read from `os.environ['LOCAL_RANK']` instead."
)


def parse_args(args: Sequence[str] | None) -> Namespace:
    """Parse a command line, or that of this process if `args` is None. `muster.run`'s namespace gets `use_env`, too."""
    parser = run.get_args_parser()
    parser.add_argument(
        "--use-env",
        "--use_env",
        default=False,
        action="store_true",
        help="Give scripts no --local-rank argument: they read the variable LOCAL_RANK.",
    )
    return parser.parse_args(args)


def launch(args: Namespace) -> None:
    """Run one node of a job to its end.

    Raises:
        ValueError: `--no-python` without `--use-env`: torch's text. For others see `muster.run.run`.
    """
    check_args(args)
    run.run(args)


def check_args(args: Namespace) -> None:
    """Refuse flags that contradict each other.

    Raises:
        ValueError: torch's text.
    """
    if args.no_python and not args.use_env:
        raise ValueError("When using the '--no-python' flag, you must also set the '--use-env' flag.")


def main(args: Sequence[str] | None = None) -> None:
    """Parse a command line and run it. A FutureWarning says what to use instead."""
    warnings.warn(DEPRECATED, category=FutureWarning, stacklevel=2)
    launch(parse_args(args))


def _become_guard() -> int:
    """Run one node as this process, like `python -m muster.run`; return the exit code."""
    from muster.agent.__main__ import main as run_agent

    warnings.warn(DEPRECATED, category=FutureWarning, stacklevel=2)
    args = parse_args(None)
    try:
        check_args(args)
    except ValueError as error:
        print_line(f"muster: {error}")
        return ExitCode.USAGE
    return run_agent(run.build_flags(args))


if __name__ == "__main__":
    sys.exit(_become_guard())
