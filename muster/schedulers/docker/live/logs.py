"""A replica's output, line by line, across the containers it had one after the other."""

import codecs
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from muster.schedulers.docker.engine.client import Engine
from muster.schedulers.docker.engine.container_state import ContainerFacts, parse_time
from muster.schedulers.docker.engine.errors import EngineGone, NotThere
from muster.schedulers.docker.spec import Label

POLL_S: Final = 0.1
"""Between two looks for the next container, or for an engine that went away; output itself is pushed."""


@dataclass(frozen=True, kw_only=True)
class ContainerLogQuery:
    """Which part of which output."""

    labels: dict[str, str | None]
    """Of the replica's containers."""
    stdout: bool = True
    stderr: bool = True
    since_s: float | None = None
    """Seconds since the epoch, by the engine's clock."""
    until_s: float | None = None


class LogReader:
    """Reads one replica's output once.

    Args:
        engine: where.
        query: what.
        wait: sleeps for some seconds.
        is_over: whether the app has ended, so that no further container will come; None: do not follow.
    """

    def __init__(
        self,
        engine: Engine,
        query: ContainerLogQuery,
        *,
        wait: Callable[[float], None],
        is_over: Callable[[], bool] | None = None,
    ) -> None:
        self._engine = engine
        self._query = query
        self._wait = wait
        self._is_over = is_over

    def lines(self) -> Iterator[str]:
        """Lines with their newline; the last of a container may have none."""
        done = -1
        while True:
            over = self._is_over is None or self._is_over()
            for container in self._containers(after=done):
                done = int(container.labels[Label.INCARNATION])
                yield from split_lines(self._frames(container.id))
            if over:
                return
            self._wait(POLL_S)

    def _containers(self, after: int) -> list[ContainerFacts]:
        try:
            found = self._engine.list_containers(self._query.labels)
        except EngineGone:
            if self._is_over is None:
                raise
            return []
        newer = [facts for facts in found if int(facts.labels[Label.INCARNATION]) > after]
        return sorted(newer, key=lambda facts: int(facts.labels[Label.INCARNATION]))

    def _frames(self, container: str) -> Iterator[bytes]:
        if self._is_over is None:
            yield from self._open(container, since_s=self._query.since_s)
        else:
            yield from self._follow(container)

    def _follow(self, container: str) -> Iterator[bytes]:
        """Until the container has ended, through restarts of the engine; each record once."""
        mark = _Mark()
        while True:
            # Looked at before reading: what is read after the end is all of it. One that was only created ends at once.
            ended = self._has_ended(container)
            since_s = self._query.since_s if mark.time == "" else parse_time(mark.time)
            try:
                for frame in self._open(container, since_s=since_s, follow=True, timestamps=True):
                    text = mark.take(frame)
                    if text is not None:
                        yield text
            except EngineGone:
                ended = False
            except NotThere:
                return
            if ended or (self._is_over is not None and self._query.until_s is not None and self._is_over()):
                return
            mark.rewind()
            self._wait(POLL_S)

    def _has_ended(self, container: str) -> bool:
        try:
            facts = self._engine.inspect_container(container)
        except EngineGone:
            return False
        except NotThere:
            return True
        never = facts.status == "created" and self._is_over is not None and self._is_over()
        return facts.exit_code is not None or never

    def _open(
        self, container: str, *, since_s: float | None, follow: bool = False, timestamps: bool = False
    ) -> Iterator[bytes]:
        return self._engine.logs(
            container,
            stdout=self._query.stdout,
            stderr=self._query.stderr,
            follow=follow,
            timestamps=timestamps,
            since_s=since_s,
            until_s=self._query.until_s,
        )


class _Mark:
    """How far a followed log was read: the engine dates each record, several may have one date."""

    def __init__(self) -> None:
        self.time = ""
        self._seen = 0
        """Records of that date handed out."""
        self._again = 0
        """Of those, passed over since the last rewind."""

    def rewind(self) -> None:
        """The log is read again from `time` on."""
        self._again = 0

    def take(self, frame: bytes) -> bytes | None:
        """A frame's text without its date; None when it was handed out before."""
        date, _, text = frame.partition(b" ")
        time = date.decode("ascii", errors="replace")
        if time < self.time:
            return None
        if time > self.time:
            self.time, self._seen, self._again = time, 0, 0
        elif self._again < self._seen:
            self._again += 1
            return None
        self._seen += 1
        self._again += 1
        return text


def split_lines(frames: Iterator[bytes]) -> Iterator[str]:
    """Joins what the engine cut and cuts at newlines; bytes that are no UTF-8 become replacement characters."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    rest = ""
    for frame in frames:
        text = rest + decoder.decode(frame)
        *lines, rest = text.split("\n")
        for line in lines:
            yield line + "\n"
    rest += decoder.decode(b"", final=True)
    if rest:
        yield rest
