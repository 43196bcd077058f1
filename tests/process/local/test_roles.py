"""Roles that wait for each other, with real agents."""

import sys
import time

import pytest
from harness import find_free_port, wait_until
from torchx.specs import AppDef

from muster.components import dist, roles
from muster.components.errors import ComponentError
from muster.schedulers.errors import SchedulerError

pytestmark = pytest.mark.usefixtures("state_home")

GATE = """\
import pathlib, socket, sys, time

while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
with socket.create_server(("127.0.0.1", int(sys.argv[2]))):
    time.sleep(600)
"""


def submit(scheduler, *parts):
    return scheduler.submit(roles.join("app", *parts), {})


def test_a_role_never_starts_before_the_one_that_it_waits_for(scheduler, tmp_path):
    """The first port of a plain role listens, or the workers of a role of agents run."""
    gate, script, port = tmp_path / "gate", tmp_path / "stamp.py", find_free_port()
    script.write_text("import sys, time\nprint('stamp', time.monotonic(), flush=True)\ntime.sleep(0.5)\n")
    app_id = submit(
        scheduler,
        roles.role("first", dist.ddp(script=str(script), j="1x1", start="cold"), after="gate"),
        roles.role("second", dist.ddp(script=str(script), j="1x1", start="cold"), after="first"),
        roles.role(
            "gate",
            roles.command(sys.executable, "-c", GATE, str(gate), str(port)),
            ports={"open": port},
            ends_with="first",
        ),
    )

    def read(role):
        return "".join(scheduler.log_iter(app_id, role, 0))

    wait_until(lambda: "waits for role gate" in read("first"), what="it says what it waits for")
    wait_until(lambda: "waits for role first" in read("second"), what="it says what it waits for")
    assert "stamp" not in read("first") + read("second")
    opened_s = time.monotonic()
    gate.touch()
    wait_until(lambda: scheduler.describe(app_id).state.name == "SUCCEEDED", what="its end")
    stamps = [float(read(role).split("stamp ")[1].split()[0]) for role in ("first", "second")]
    assert opened_s < stamps[0] < stamps[1]


def test_policies_are_refused_where_they_are_given_or_submitted(scheduler):
    plain = roles.command("true")
    with pytest.raises(ComponentError, match="role 'a': restart must be one of never, on-failure, always, not 'maybe'"):
        roles.role("a", plain, restart="maybe")
    two = AppDef("two", roles=[plain, plain])
    with pytest.raises(ComponentError, match="role 'a': its app must have one role, and has 2"):
        roles.role("a", two)
    learner = roles.role("learner", dist.ddp(script="train.py", j="1x1"))
    with pytest.raises(SchedulerError, match="role 'a': after='nobody' is none of the app's other roles: learner"):
        submit(scheduler, learner, roles.role("a", plain, after="nobody"))
