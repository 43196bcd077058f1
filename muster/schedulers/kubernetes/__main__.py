"""`python -m muster.schedulers.kubernetes resize|delete APP_HANDLE`: what TorchX's command line does not offer."""

import argparse
import sys
from collections.abc import Sequence

from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.kubernetes.scheduler import BACKEND, create_scheduler


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. The exit code is 1 after an error of the caller or the cluster."""
    parser = argparse.ArgumentParser(prog="python -m muster.schedulers.kubernetes", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    resize = commands.add_parser("resize", help="change the number of nodes of an elastic job within its MIN:MAX")
    resize.add_argument("app", help="app handle kubernetes://SESSION/NAMESPACE:NAME, or app id NAMESPACE:NAME")
    resize.add_argument("nodes", type=int, help="new number of nodes, within MIN:MAX of -j")
    resize.add_argument("--role", help="which role, if several are elastic")
    delete = commands.add_parser("delete", help="delete a job and everything that belongs to it")
    delete.add_argument("app", help="app handle or app id")
    args = parser.parse_args(argv)
    scheduler = create_scheduler("muster")
    app_id = args.app.rpartition("/")[2] if args.app.startswith(f"{BACKEND}://") else args.app
    try:
        if args.command == "resize":
            scheduler.resize(app_id, args.nodes, args.role)
        else:
            scheduler.delete_app(app_id)
    except (SchedulerError, EngineError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    finally:
        scheduler.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
