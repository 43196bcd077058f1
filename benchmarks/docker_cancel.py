"""Cancel of three replicas that ignore SIGTERM, in units of one grace period: at most 1.2.

python benchmarks/docker_cancel.py [--count N]

Needs a Docker engine and the image muster-test:bare (.ci/docker-engine start; .ci/docker-image). TorchX's own adapter
stops one replica after the other: three grace periods.
"""

import time

from _sampling import parse_count, sample_in_turn, show
from torchx.runner import Runner
from torchx.specs import AppDef, Resource, Role

from muster.schedulers.docker import create_detached_scheduler

GRACE_S = 5.0
STUBBORN = "trap '' TERM; echo ready; while :; do sleep 1; done"


def build_app() -> AppDef:
    """Build three replicas that only SIGKILL ends."""
    resource = Resource(cpu=-1, gpu=0, memMB=0)
    args = ["-c", STUBBORN]
    role = Role(name="w", image="muster-test:bare", entrypoint="sh", args=args, num_replicas=3, resource=resource)
    return AppDef(name="stubborn", roles=[role])


def measure(runner: Runner) -> float:
    """Return the seconds from `cancel` until the app reads CANCELLED and nothing of it runs."""
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


def main(count: int) -> None:
    with Runner("bench", {"docker": create_detached_scheduler}) as runner:
        series = sample_in_turn(count, {"muster": lambda: measure(runner) / GRACE_S}, warmups=0)
    show("cancel of 3 stubborn replicas", series, unit=f"times the grace period of {GRACE_S:g} s", limit=1.2)


if __name__ == "__main__":
    main(parse_count(__doc__))
