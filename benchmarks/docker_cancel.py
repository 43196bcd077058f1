"""Cancel of three replicas that ignore SIGTERM, in units of one grace period: at most 1.2.

python benchmarks/docker_cancel.py [RUNS]

Needs a Docker engine and the image muster-test:bare (.ci/docker-engine start; .ci/docker-image). TorchX's own adapter
stops one replica after the other: three grace periods.
"""

import statistics
import sys
import time

from torchx.runner import Runner
from torchx.specs import AppDef, Resource, Role

from muster.schedulers.docker import create_detached_scheduler

GRACE_S = 5.0
STUBBORN = "trap '' TERM; echo ready; while :; do sleep 1; done"


def build_app() -> AppDef:
    """Three replicas that only SIGKILL ends."""
    resource = Resource(cpu=-1, gpu=0, memMB=0)
    args = ["-c", STUBBORN]
    role = Role(name="w", image="muster-test:bare", entrypoint="sh", args=args, num_replicas=3, resource=resource)
    return AppDef(name="stubborn", roles=[role])


def measure(runner: Runner) -> float:
    """Seconds from `cancel` until the app reads CANCELLED and nothing of it runs."""
    handle = runner.run(build_app(), "docker", cfg={"grace_s": GRACE_S, "keep": "none"})
    for replica in range(3):
        next(iter(runner.log_lines(handle, "w", replica, should_tail=True)))
    began_s = time.monotonic()
    runner.cancel(handle)
    status = runner.wait(handle, wait_interval=0.02)
    took_s = time.monotonic() - began_s
    assert status is not None
    assert status.state.name == "CANCELLED", status
    create_detached_scheduler("bench").delete(handle.rsplit("/", 1)[-1])
    return took_s


def main(runs: int) -> None:
    with Runner("bench", {"docker": create_detached_scheduler}) as runner:
        ratios = sorted(measure(runner) / GRACE_S for _ in range(runs))
    median = statistics.median(ratios)
    print(f"cancel of 3 stubborn replicas: {median:.2f}x one grace period of {GRACE_S:g} s")
    print(f"n={runs}, {ratios[0]:.2f} to {ratios[-1]:.2f}; at most 1.2x wanted: {'met' if median <= 1.2 else 'MISSED'}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
