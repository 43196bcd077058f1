"""The part: remembers what was in use before the first workers, and holds later ones back."""

from typing import TYPE_CHECKING

from muster._shared.processes import find_nvml
from muster.agent.features.device_memory.memory import DeviceMemory
from muster.agent.node.round_parts import PartContext, RoundPart, Start

if TYPE_CHECKING:
    from muster.agent.round import Round
    from muster.agent.workers.pool import WorkerEnd


class DeviceMemoryPart(RoundPart):
    """Holds a start back if workers of the last round failed or were stopped."""

    def __init__(self, context: PartContext) -> None:
        env = context.config.base_env
        self._context = context
        self._memory = DeviceMemory(find_nvml(env) or "", context.config.nproc, env.get("CUDA_VISIBLE_DEVICES"))
        self._is_restart = False

    def begin_round(self, formed: "Round", start: Start | None) -> None:
        """See `RoundPart`."""
        del formed
        is_restart, self._is_restart = self._is_restart, False
        if start is None:
            return
        if not is_restart:
            self._context.loop.call_in_thread(self._memory.remember, lambda _: None, lambda _error: None)
            return
        release = start.hold()

        def finish(lines: tuple[str, ...]) -> None:
            for line in lines:
                self._context.logs.print_line(line)
            release()

        self._context.loop.call_in_thread(
            lambda: self._memory.wait(lambda: start.has_stopped), finish, lambda _error: ()
        )

    def end_worker(self, end: "WorkerEnd") -> None:
        """See `RoundPart`."""
        self._is_restart |= end.code != 0 or end.signalled_s is not None


def create_part(context: PartContext) -> DeviceMemoryPart:
    """Create the part of one agent."""
    return DeviceMemoryPart(context)
