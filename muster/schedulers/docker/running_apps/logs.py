"""Reads a replica's output, line by line, through all its containers in order."""

import time
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from torchx.schedulers.api import Stream

from muster.schedulers.adapter.log_position import LogBroken, Position, follow_records
from muster.schedulers.adapter.scheduler import LogRequest
from muster.schedulers.docker.engine import ContainerFacts, Engine
from muster.schedulers.docker.sdk import EngineUnavailable, NotFound
from muster.schedulers.docker.spec import Label
from muster.schedulers.lines import LineSplitter, add_time
from muster.schedulers.timestamps import Timestamp, parse_timestamp

CHECK_S: Final = 1.0
"""The longest time between two looks for the next container: nothing announces an engine that is back."""


Frame: TypeAlias = tuple[int, Timestamp | None, bytes]
"""The number of a stream, the time of a record if it is known, and the record."""


class LogReader:
    """Reads one replica's output once.

    Args:
        engine: the one that has the containers.
        app_id: of the replica's app.
        request: what to read. Times are those of the engine's clock.
        wait: returns once the app's state has changed, which follows from the engine's events, or at the latest after
            the given seconds. Output itself is pushed.
        has_ended: whether the app has ended, so that there is no further container. None: do not follow.
    """

    def __init__(
        self,
        engine: Engine,
        app_id: str,
        request: LogRequest,
        *,
        wait: Callable[[float], None] = time.sleep,
        has_ended: Callable[[], bool] | None = None,
    ) -> None:
        self._engine = engine
        self._request = request
        self._labels = {Label.APP: app_id, Label.ROLE: request.role, Label.REPLICA: str(request.index)}
        self._wait = wait
        self._app_has_ended = has_ended
        self._positions: dict[str, Position] = {}
        """Container -> how far it was followed: one that is started again goes on from there."""

    def lines(self) -> Iterator[str]:
        """Return the lines with their newline. The last one of a container may have none.

        A line that begins with "[muster]" is ours. It says that the replica has no container.
        """
        done = -1
        while True:
            ended = self._app_has_ended is None or self._app_has_ended()
            for container in self._containers(after=done):
                done = container.incarnation
                yield from join_lines(self._frames(container.id))
            if ended:
                break
            self._wait(CHECK_S)
        if done < 0:
            replica = f"{self._request.role}/{self._request.index}"
            yield f"[muster] {replica} has no log: its containers were removed, and their output with them\n"

    def _containers(self, after: int) -> list[ContainerFacts]:
        try:
            found = self._engine.list_containers(self._labels)
        except EngineUnavailable:
            if self._app_has_ended is None:
                raise
            return []
        # A person has restarted one that runs again.
        return [each for each in found if each.incarnation > after or (each.incarnation == after and each.running)]

    def _frames(self, container: str) -> Iterator[Frame]:
        if self._app_has_ended is None:
            for stream, frame in self._open(container, since_s=self._request.since_s):
                yield stream, *split_date(frame)
        else:
            for stream, record in self._follow(container):
                yield stream, None, record

    def _follow(self, container: str) -> Iterator[tuple[int, bytes]]:
        """Yield each record once, until the container has ended, through restarts of the engine."""
        since_s = self._request.since_s
        since = None if since_s is None else (int(since_s), int(since_s % 1 * 1e9))
        position = self._positions.setdefault(container, Position(since))

        def read(resumed: Timestamp | None) -> Iterator[tuple[Timestamp | None, bytes]]:
            from_s = None if resumed is None else resumed[0] + resumed[1] / 1e9
            try:
                for stream, frame in self._open(container, since_s=from_s, follow=True):
                    stamp, record = split_date(frame)
                    yield stamp, b"%d" % stream + record
            except EngineUnavailable as error:
                raise LogBroken from error
            except NotFound:
                return

        def has_ended() -> bool:
            # One only created ends at once.
            is_past = self._request.until_s is not None and self._app_has_ended is not None and self._app_has_ended()
            return is_past or self._has_ended(container)

        for record in follow_records(read, has_ended, lambda: self._wait(CHECK_S), position):
            yield int(record[:1]), record[1:]

    def _has_ended(self, container: str) -> bool:
        try:
            facts = self._engine.inspect_container(container)
        except EngineUnavailable:
            return False
        except NotFound:
            return True
        never = facts.status == "created" and self._app_has_ended is not None and self._app_has_ended()
        return facts.exit_code is not None or never

    def _open(self, container: str, *, since_s: float | None, follow: bool = False) -> Iterator[tuple[int, bytes]]:
        return self._engine.logs(
            container,
            stdout=self._request.stream != Stream.STDERR,
            stderr=self._request.stream != Stream.STDOUT,
            follow=follow,
            timestamps=True,
            since_s=since_s,
            until_s=self._request.until_s,
        )


def split_date(frame: bytes) -> tuple[Timestamp | None, bytes]:
    """Split a frame into its time and the record.

    Return None and the whole frame if the engine itself has written it.
    """
    date, _, record = frame.partition(b" ")
    try:
        return parse_timestamp(date.decode(errors="replace")), record
    except ValueError:
        return None, frame


def join_lines(frames: Iterator[Frame]) -> Iterator[str]:
    """Return the lines of all streams of a container, in the order in which they are complete.

    The streams are joined separately. A line has the time of its last frame.
    """
    splitters: dict[int, LineSplitter] = {}
    stamp: Timestamp | None = None
    for stream, stamp, piece in frames:
        for line in splitters.setdefault(stream, LineSplitter()).feed(piece):
            yield add_time(line.decode(errors="replace"), stamp)
    for splitter in splitters.values():
        if rest := splitter.take_rest():
            yield add_time(rest.decode(errors="replace"), stamp)
