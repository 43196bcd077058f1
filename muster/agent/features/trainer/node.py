"""The part: opens the port on the node of global rank 0, and records in the page what the Trainer there reports."""

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from muster.agent.features.part import PartContext, RoundPart, Start
from muster.agent.features.trainer.port import Endpoint, TrainerPort

if TYPE_CHECKING:
    from muster.agent.round import Round
    from muster.agent.workers.status_page import Told


class TrainerPart(RoundPart):
    """The port, from the first round on in which this node has global rank 0."""

    def __init__(self, context: PartContext) -> None:
        self._context = context
        self._port: TrainerPort | None = None
        self._path = ""
        """The path of the round's requests; "" while another node has global rank 0."""

    def begin_round(self, formed: "Round", start: Start | None) -> None:
        """See `RoundPart`."""
        del start
        self._path = ""
        if formed.rank_offset == 0 and self._context.get_page() is not None:
            with suppress(OSError):  # without the Trainer's progress
                self._port = self._port or TrainerPort(self._context.loop, self._open_endpoint)
                self._path = f"/{formed.number}"

    def _open_endpoint(self, token: str) -> Endpoint:
        from muster.agent.features.trainer.endpoint import TrainerEndpoint

        return TrainerEndpoint(self._context.loop, token, self._record)

    def _record(self, path: str, told: "Told") -> None:
        """Record a report, but not one of an earlier round."""
        page = self._context.get_page()
        if page is not None and path == self._path:
            page.record_told(0, told)

    def build_env(self, formed: "Round", local_rank: int) -> Mapping[str, str]:
        """See `RoundPart`."""
        if self._port is None or not self._path or formed.rank_offset + local_rank:
            return {}
        return self._port.build_env(self._context.config.base_env, self._path)

    def close(self) -> None:
        """See `RoundPart`."""
        if self._port is not None:
            self._port.close()


def create_part(context: PartContext) -> TrainerPart:
    """Create the part of one agent."""
    return TrainerPart(context)
