"""A job on Kubernetes whose nodes share a volume: data is read from it, checkpoints and the agents' logs go there.

    python examples/kubernetes_volume.py                          # prints what would be submitted; needs no cluster
    python examples/kubernetes_volume.py --namespace training --claim checkpoints --gpus 8 -j 2:4x8 --submit

The claim must exist in the namespace of the job, and several nodes need its access mode ReadWriteMany:

    apiVersion: v1
    kind: PersistentVolumeClaim
    metadata: {name: checkpoints, namespace: training}
    spec: {accessModes: [ReadWriteMany], resources: {requests: {storage: 200Gi}}}
"""

import argparse
import sys
from pathlib import Path

from torchx.runner import get_runner
from torchx.specs import AppDef, AppState

from muster.components import dist

WORKSPACE = Path(__file__).resolve().parent / "digits"  # what travels with the job
SCRIPT = "train.py"
VOLUME = "/volume"


def main() -> int:
    """Print the request, and submit it where that is asked for."""
    options = parse_options()
    with get_runner() as runner:
        cfg = {"namespace": options.namespace, "grace_s": 120.0}
        dry_run = runner.dryrun(build_app(options), "kubernetes", cfg, workspace=f"file://{WORKSPACE}")
        print(dry_run)
        if not options.submit:
            return 0
        handle = runner.schedule(dry_run)
        print(f"submitted {handle}", flush=True)
        status = runner.wait(handle)
        return 0 if status is not None and status.state is AppState.SUCCEEDED else 1


def build_app(options: argparse.Namespace) -> AppDef:
    """Build the job, with the claim as a mount of every node."""
    return dist.ddp(
        *("--output", f"{VOLUME}/digits"),
        script=SCRIPT,
        j=options.j,
        gpu=options.gpus,
        image=options.image,
        name="digits/volume",
        max_retries=3,
        mounts=["type=volume", f"src={options.claim}", f"dst={VOLUME}"],
        # with it worker.resume_path() outlives the end of all pods
        env={"MUSTER_LOG_DIR": f"{VOLUME}/muster"},
    )


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--namespace", default="training")
    parser.add_argument("--claim", default="checkpoints", help="name of the claim, in that namespace")
    parser.add_argument("--image", default="registry.example/torch:2.13", help="has Python 3.10 or newer, and torch")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each node")
    parser.add_argument("-j", default="2x2", help="[[MIN:]NODESx]PROCESSES")
    parser.add_argument("--submit", action="store_true", help="submit it; else it is only printed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
