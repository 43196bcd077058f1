"""The part: makes the memory when a worker wants it, and has `NodeSnapshots` handle it from then on."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from muster._shared.contract import Env
from muster._shared.records import replace
from muster.agent.features.snapshots.flags import SnapshotSettings
from muster.agent.features.snapshots.memory import SnapshotFiles, SnapshotRound
from muster.agent.features.snapshots.messages import (
    FEATURE,
    ORDERS,
    Generation,
    Holdings,
    Report,
    Share,
    pack,
    unpack,
)
from muster.agent.features.snapshots.node_snapshots import NodeSnapshots
from muster.agent.node.round_parts import PartContext, RoundPart, Start

if TYPE_CHECKING:
    from muster.agent.rendezvous.interface import Stream
    from muster.agent.round import PartMemory, Round
    from muster.agent.telemetry import Observed


class SnapshotsPart(RoundPart):
    """The snapshots of one node."""

    def __init__(self, context: PartContext) -> None:
        self._context = context
        self._settings: SnapshotSettings = context.config.features.get(FEATURE, SnapshotSettings())
        self._has_failed = False
        self._files: SnapshotFiles | None = None
        self._snapshots: NodeSnapshots | None = None
        self._round: SnapshotRound | None = None
        """The round, once its workers have the memory."""

    def add_to(self, observed: "Observed") -> "Observed":
        """See `RoundPart`."""
        return observed if self._snapshots is None else replace(observed, kept=self._snapshots.confirmed)

    # -- rounds -----------------------------------------------------------------------------------------------------

    def begin_round(self, formed: "Round", start: Start | None) -> None:
        """See `RoundPart`."""
        if start is None:
            self._continue_round(formed)
        elif (snapshots := self._load()) is not None and formed.lineage:
            self._round = self._build_round(formed)
            snapshots.begin_round(self._round, start.hold(), start.fail)

    def _continue_round(self, formed: "Round") -> None:
        """Give running workers the memory that one of them wants."""
        page, snapshots = self._context.get_page(), self._load()
        if page is None:
            return
        if snapshots is None or self._files is None or not formed.lineage:
            page.answer_memory(None)
            return
        self._round = self._build_round(formed)
        self._files.begin_round(formed.number, formed.lineage)
        snapshots.continue_round(self._round)
        page.answer_memory(self._files.control_fd)

    def _build_round(self, formed: "Round") -> SnapshotRound:
        memory = next((each for each in formed.memories if each.feature == FEATURE), None)
        content = next((each.content for each in formed.shares if each.feature == FEATURE), None)
        share = Share() if content is None else unpack(Share, content)
        return SnapshotRound(
            number=formed.number,
            lineage=formed.lineage,
            group_rank=formed.group_rank,
            group_world_size=formed.group_world_size,
            sends_copies=formed.group_world_size > 1 and self._settings.copies > 0,
            snapshot=None if memory is None else unpack(Generation, memory.content),
            source=share.source,
            neighbour=share.neighbour,
        )

    def _load(self) -> NodeSnapshots | None:
        """Create the memory once, unless it is switched off or cannot be had."""
        context, config, settings = self._context, self._context.config, self._settings
        if self._snapshots is not None or self._has_failed or settings.limit_bytes == 0:
            return self._snapshots
        try:
            self._files = SnapshotFiles(
                nproc=config.nproc,
                share=settings.share,
                limit_bytes=settings.limit_bytes or 0,
                copies=settings.copies if config.rendezvous.max_nodes > 1 else 0,
            )
        except OSError as error:
            self._has_failed = True
            context.logs.print_line(f"no memory for snapshots ({error}): muster.snapshots keeps none")
            return None

        def send(round_number: int, report: Report) -> None:
            context.send(round_number, pack(report))

        self._snapshots = NodeSnapshots(context.loop, self._files, context.open_stream, send, context.logs.print_line)
        return self._snapshots

    def build_env(self, formed: "Round", local_rank: int) -> Mapping[str, str]:
        """See `RoundPart`."""
        env: dict[str, str] = {}
        if formed.continued_step is not None:
            env[Env.SNAPSHOT_STEP] = str(formed.continued_step)
        if self._files is not None and self._round is not None:
            env |= self._files.build_env(formed.number, local_rank)
        return env

    def end_round(self) -> None:
        """See `RoundPart`."""
        self._round = None

    # -- the other nodes --------------------------------------------------------------------------------------------

    def build_offer(self) -> str | None:
        """See `RoundPart`."""
        holdings = () if self._snapshots is None else self._snapshots.list_holdings()
        return pack(Holdings(holdings=holdings)) if holdings else None

    def obey(self, round_number: int, content: str) -> None:
        """See `RoundPart`."""
        order = ORDERS.parse(content)
        if self._snapshots is not None and order is not None:
            self._snapshots.obey(round_number, order)

    def remember(self, round_number: int, memory: "PartMemory") -> None:
        """See `RoundPart`."""
        if self._snapshots is not None:
            self._snapshots.confirm(round_number, unpack(Generation, memory.content))

    def take_stream(self, stream: "Stream") -> None:
        """See `RoundPart`."""
        snapshots = self._load()
        if snapshots is None:
            stream.close()
        else:
            snapshots.take_stream(stream)

    def close(self) -> None:
        """See `RoundPart`."""
        if self._snapshots is not None:
            self._snapshots.close()
        if self._files is not None:
            self._files.close()


def create_part(context: PartContext) -> SnapshotsPart:
    """Create the part of one agent."""
    return SnapshotsPart(context)
