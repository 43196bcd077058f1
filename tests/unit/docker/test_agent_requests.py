"""An agent in a container is asked through an engine that may never answer."""

import threading
from types import SimpleNamespace

from muster._shared.control import NO_AGENT
from muster.schedulers.docker.scheduler import NodeAsker
from muster.schedulers.docker.sdk import Conflict
from muster.schedulers.supervision.state import ReplicaId

REPLICA = ReplicaId("r", 0)


def ask(run_inside, limit_s=60.0):
    container = {"role": "r", "replica": 0, "command": ["python3", "agent.zip", "--nnodes", "1"]}
    spec = SimpleNamespace(app_id="a", details={"request": {"containers": [container]}})
    engine = SimpleNamespace(list_container_ids=lambda labels, running_only: ["c0"], run_inside=run_inside)
    return NodeAsker(engine)(spec, REPLICA, ["ask", "job", "stop"], limit_s)


def test_the_command_runs_in_the_container():
    asked = []
    answer = ask(lambda container, command: asked.append((container, command)) or (0, "{}", ""))
    assert (answer, asked) == ((0, "{}", ""), [("c0", ["python3", "agent.zip", "ask", "job", "stop"])])


def test_an_engine_that_hangs_is_given_up():
    """As when the container is paused while the command runs in it."""
    never = threading.Event()
    assert ask(lambda container, command: never.wait(60), 0.05) == (1, "", "no response in 0.05 s")
    never.set()


def test_a_container_that_has_ended_is_no_agent():
    def refuse(container, command):
        raise Conflict("container c0 is not running")

    assert ask(refuse) == (NO_AGENT, "", "container c0 is not running")
