"""Asks the agent in a container: `docker exec`, whose environment has the job's token."""

from collections.abc import Sequence

from muster._shared.control import NO_AGENT, CommandExit, ControlError, call_limited
from muster.schedulers.agent_command import build_ask_command
from muster.schedulers.docker.engine.client import Engine
from muster.schedulers.docker.engine.errors import Conflict, NotFound
from muster.schedulers.docker.spec import Label, build_user_id
from muster.schedulers.node_program.pipe import NodePipe
from muster.schedulers.supervision.app_folder import AppSpec
from muster.schedulers.supervision.state import ReplicaId


class NodeAsker:
    """A `supervision.agent_requests.AskNode`.

    Args:
        engine: the one that runs the containers. The caller closes it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, spec: AppSpec, replica: ReplicaId, words: Sequence[str], limit_s: float) -> tuple[int, str, str]:
        """Run the words in the replica's container."""
        return self.run(spec, replica, build_ask_command(_find_command(spec, replica), words), limit_s)

    def find_container(self, spec: AppSpec, replica: ReplicaId) -> str | None:
        """Return the id of a replica's container, if it runs."""
        labels = {Label.APP: spec.app_id, Label.USER: build_user_id()}
        labels |= {Label.ROLE: replica.role, Label.REPLICA: str(replica.index)}
        return next(iter(self._engine.list_container_ids(labels, running_only=True)), None)

    def open(self, spec: AppSpec, replica: ReplicaId, words: Sequence[str]) -> NodePipe:
        """Start a Python in the replica's container.

        Raises:
            ControlError: it does not run, or has ended.
        """
        running = self.find_container(spec, replica)
        if running is None:
            raise ControlError(f"the container of {replica} does not run", CommandExit.ENDED)
        try:
            return self._engine.open_inside(running, [_find_command(spec, replica)[0], *words]).pump()
        except (NotFound, Conflict) as error:
            raise ControlError(str(error), CommandExit.ENDED) from error

    def run(self, spec: AppSpec, replica: ReplicaId, command: Sequence[str], limit_s: float) -> tuple[int, str, str]:
        """Run a command in the replica's container: its exit code, standard output and standard error."""
        running = self.find_container(spec, replica)
        if running is None:
            return NO_AGENT, "", "its container does not run"
        try:
            return call_limited(lambda: self._engine.run_inside(running, command), limit_s)
        except (NotFound, Conflict) as error:  # it has ended
            return NO_AGENT, "", str(error)
        except TimeoutError as error:  # it was paused, or the engine hangs
            return 1, "", str(error)


def _find_command(spec: AppSpec, replica: ReplicaId) -> Sequence[str]:
    commands = {(each["role"], each["replica"]): each["command"] for each in spec.details["request"]["containers"]}
    command: Sequence[str] = commands[replica.role, replica.index]
    return command
