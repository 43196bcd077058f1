"""What both examples share: an app of two roles, submitted and watched."""

import argparse
import os
import secrets
import tempfile
from pathlib import Path

from meeting import KEY_VARIABLE
from torchx.runner import get_runner
from torchx.specs import AppDef, AppState, Role

from muster.components import dist

ROOT = Path(__file__).resolve().parents[2]
LAST_LINES = 3


def parse_options(text: str | None) -> argparse.Namespace:
    """Parse the command line of the program that submits."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheduler", default="local_cwd")
    parser.add_argument("--image", help="image of the nodes, where the scheduler has images")
    parser.add_argument("--meet", type=Path, help="folder that all nodes share (default: a temporary one)")
    return parser.parse_args()


def build_role(options: argparse.Namespace, script: str, name: str, j: str, gpus: int = 0) -> Role:
    """Build one role, which is its own job and runs `script name FOLDER`."""
    more = {} if options.image is None else {"image": options.image}
    if "docker" in options.scheduler:
        more["mounts"] = ["type=bind", f"src={options.meet}", f"dst={options.meet}"]
    app = dist.ddp(name, str(options.meet), script=script, j=j, gpu=gpus, name=f"roles/{name}", **more)
    role = app.roles[0]
    role.name = name
    role.env[KEY_VARIABLE] = options.key
    return role


def submit(options: argparse.Namespace, name: str, script: str, sizes: dict[str, str]) -> int:
    """Submit an app with these roles and wait for its end; the exit code says whether it succeeded.

    Args:
        options: of `parse_options`.
        name: of the app.
        script: what every role runs, relative to the repository.
        sizes: role -> its `-j`. The first role is the one whose last lines are printed.
    """
    os.chdir(ROOT)  # local_cwd runs jobs in the current folder; all others send the workspace
    options.key = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="meeting-") as folder, get_runner() as runner:
        options.meet = options.meet or Path(folder)
        app = AppDef(name=name, roles=[build_role(options, script, role, j) for role, j in sizes.items()])
        handle = runner.run(app, options.scheduler, workspace=f"file://{ROOT}")
        print(f"submitted {handle}", flush=True)
        status = runner.wait(handle, wait_interval=0.5)
        if status is None:
            print(f"{handle} is gone")
            return 1
        for line in list(runner.log_lines(handle, next(iter(sizes)), k=0))[-LAST_LINES:]:
            print(f"  {line.rstrip()}")
        print(f"{handle} is {status.state.name}")
        return 0 if status.state is AppState.SUCCEEDED else 1
