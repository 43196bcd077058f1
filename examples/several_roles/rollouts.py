"""A learner and three actors as one app: an actor that fails is started again alone, and the learner goes on.

python examples/several_roles/rollouts.py
python examples/several_roles/rollouts.py --scheduler kubernetes --image registry.example/torch:2.13
"""

import argparse
import os
import socket
import sys
from pathlib import Path

from torchx.runner import get_runner
from torchx.specs import AppDef, AppState

from muster.components import dist, roles

FOLDER = Path(__file__).resolve().parent


def build_app(image: str, port: int, steps: int) -> AppDef:
    """Build the app: the learner is critical, the actors serve it."""
    more = {"image": image} if image else {}
    learner = dist.ddp(str(steps), script="learner.py", j="1x2", max_retries=1, env={"LEARNER_PORT": str(port)}, **more)
    actor = roles.command("python3", "actor.py", replicas=3, image=image)
    policy = {"restart": "always", "backoff_s": 0.1, "after": "learner", "ends_with": "learner", "grace_s": 5}
    return roles.join(
        "rl",
        roles.role("learner", learner, ports={"samples": port}),
        roles.role("actor", actor, critical=False, **policy),
    )


def find_port() -> int:
    """Return a port that is free on this machine."""
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheduler", default="local_cwd")
    parser.add_argument("--image", default="", help="image of the nodes, where the scheduler has images")
    parser.add_argument("--port", type=int, help="of the learner (default: one that is free here)")
    parser.add_argument("--steps", type=int, default=200)
    return parser.parse_args()


def main() -> int:
    """Submit the app, wait for its end, and print how the learner ended."""
    options = parse_options()
    os.chdir(FOLDER)  # local_cwd runs jobs in the current folder; all others send the workspace
    app = build_app(options.image, options.port or find_port(), options.steps)
    with get_runner() as runner:
        handle = runner.run(app, options.scheduler, workspace=f"file://{FOLDER}")
        print(f"submitted {handle}", flush=True)
        status = runner.wait(handle, wait_interval=0.5)
        for line in list(runner.log_lines(handle, "learner", k=0))[-3:]:
            print(f"  {line.rstrip()}")
        print(f"{handle} is {'gone' if status is None else status.state.name}")
    return 0 if status is not None and status.state is AppState.SUCCEEDED else 1


if __name__ == "__main__":
    sys.exit(main())
