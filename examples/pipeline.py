"""Makes a job in Python, as a pipeline does: AppDef, dry run, submission, logs, state.

python examples/pipeline.py
python examples/pipeline.py --scheduler kubernetes -j 2:4x8 --image registry.example/torch:2.13
"""

import argparse
import os
import sys
from pathlib import Path

from torchx.runner import get_runner
from torchx.specs import AppDef, AppState

from muster.components import dist

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = "examples/digits/train.py"  # relative to the workspace, so that it is right on every node
LAST_LINES = 5


def main() -> int:
    """Run one training; the exit code says whether it succeeded."""
    options = parse_options()
    os.chdir(ROOT)  # local_cwd runs jobs in the current folder; all others send the workspace
    app = build_app(options)
    with get_runner() as runner:
        # what is printed is what runs: the same object is scheduled
        dry_run = runner.dryrun(app, options.scheduler, workspace=f"file://{ROOT}")
        print(dry_run)
        handle = runner.schedule(dry_run)
        print(f"submitted {handle}")

        status = runner.wait(handle, wait_interval=1)
        if status is None:
            print(f"{handle} is gone")
            return 1
        lines = list(runner.log_lines(handle, app.roles[0].name, k=0))
        print(f"the last lines of node 0, of {len(lines)}:")
        for line in lines[-LAST_LINES:]:
            print(f"  {line.rstrip()}")
        print(f"{handle} is {status.state.name}")
        return 0 if status.state is AppState.SUCCEEDED else 1


def build_app(options: argparse.Namespace) -> AppDef:
    """Build the job, which names no scheduler."""
    arguments = {} if options.image is None else {"image": options.image}
    return dist.ddp(
        *options.script_args, script=SCRIPT, j=options.j, name="digits/pipeline", max_retries=1, **arguments
    )


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheduler", default="local_cwd")
    parser.add_argument("-j", default="2x2", help="[[MIN:]NODESx]PROCESSES")
    parser.add_argument("--image", help="image of the nodes, where the scheduler has images")
    parser.add_argument("script_args", nargs="*", help="arguments of the training script, after --")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
