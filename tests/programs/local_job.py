"""Submits an app of one role through TorchX's runner, as a pipeline does, and waits.

    python local_job.py SCHEDULER CFG_JSON ROLE_JSON

Prints the app's handle, then its final state. `ROLE_JSON` are keyword arguments of Role.
"""

import json
import sys

from torchx.runner import get_runner
from torchx.specs import AppDef, Resource, Role


def main() -> None:
    """See the module's docstring."""
    scheduler, cfg, role = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    app = AppDef("job", roles=[Role(**{"name": "r", "image": "", "resource": Resource(cpu=1, gpu=0, memMB=1)} | role)])
    with get_runner() as runner:
        handle = runner.run(app, scheduler, cfg)
        print(handle, flush=True)
        # An end that `wait` does not learn of at once is learned of too late for any test.
        print(runner.wait(handle, wait_interval=600).state.name, flush=True)


if __name__ == "__main__":
    main()
