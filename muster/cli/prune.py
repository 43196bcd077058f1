"""`muster prune`: shows what jobs that have ended left behind, asks, and removes it.

Each scheduler, also one of another package, finds what its apps have left (`PluginScheduler.find_leftovers`). Unpacked
agents, and logs of agents that were started by hand, are found here.

TorchX 0.7 has no command that removes them, and the nightly's removes one job at a time. Jobs that run, and jobs of
other users and other homes, are never listed here.
"""

import fcntl
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from muster._shared.contract import print_line
from muster._shared.control import CommandExit, ControlError
from muster._shared.folders import remove_folder
from muster._shared.foreign_files import walk_files
from muster._shared.ownership import check_folder
from muster._shared.reports import format_size
from muster.cli.adapters import close_quietly, create_scheduler, describe_error
from muster.cli.answers import confirm, say
from muster.cli.overview import format_age
from muster.schedulers import bundle_start
from muster.schedulers.adapter.properties import list_properties
from muster.schedulers.adapter.scheduler import Leftover, measure_folder
from muster.schedulers.errors import EngineError
from muster.schedulers.supervision.registry import find_state_dir

_AGENT_LOGS: Final = re.compile(r"muster_[a-z0-9_]{8}")
"""As `tempfile.mkdtemp` names the folder of an agent without `--log-dir`."""
logger = logging.getLogger(__name__)


def prune(*, older_than_s: float, dry_run: bool, yes: bool) -> int:
    """Remove what jobs left behind.

    Args:
        older_than_s: only of jobs that ended at least this long ago.
        dry_run: remove nothing.
        yes: do not ask.

    Returns:
        The exit code: 1 if something could not be removed or the answer was no.
    """
    with ExitStack() as opened:
        try:
            found = find_leftovers(os.environ, ended_before_s=time.time() - older_than_s, opened=opened)
        except EngineError as error:
            say(str(error))
            return 1
        return _remove_all(found, dry_run=dry_run, yes=yes)


def _remove_all(found: Sequence[Leftover], *, dry_run: bool, yes: bool) -> int:
    """Show it, ask, and remove it. Return the exit code."""
    if not found:
        print("nothing to remove")
        return 0
    print_leftovers(found)
    if dry_run:
        return 0
    if not yes and not confirm(f"Remove {'it' if len(found) == 1 else 'all of it'}?", "remove this"):
        print("nothing was removed")
        return 1
    return min(1, sum(not _remove(each) for each in found))


def print_leftovers(found: Sequence[Leftover]) -> None:
    """Print one line for each, and the sum."""
    width = max(len(each.name) for each in found)
    for each in found:
        line = f"{each.name:{width}}  {format_size(each.size_bytes):>8}  {format_age(each.ended_s):>16}  {each.what}"
        print_line(line, sys.stdout)
    print_line(f"{len(found)} in all, {format_size(sum(each.size_bytes for each in found))} in files", sys.stdout)


def _remove(leftover: Leftover) -> bool:
    try:
        leftover.remove()
    except FileNotFoundError:  # another command has removed it
        pass
    except BlockingIOError:
        print_line(f"{leftover.name} stays: a job has begun to use it", sys.stdout)
    except Exception as error:  # noqa: BLE001  # it may be another package's
        print_line(f"{leftover.name} is not removed: {describe_error(error)}")
        return False
    return True


def find_leftovers(env: Mapping[str, str], *, ended_before_s: float, opened: ExitStack) -> list[Leftover]:
    """Find what can be removed, oldest first.

    Args:
        env: the environment, for the state folder and the folder of temporary files.
        ended_before_s: wall-clock seconds. Jobs that ended later are left alone.
        opened: closes the schedulers with which what was found is removed.
    """
    find_state_dir(env)  # once for all schedulers: it may be another user's
    found = [*_find_of_schedulers(opened), *_find_unpacked_agents()]
    found += _find_logs_of_agents(Path(env.get("TMPDIR") or tempfile.gettempdir()))
    old = [each for each in found if each.ended_s is None or each.ended_s <= ended_before_s]
    return sorted(old, key=lambda each: (each.ended_s or 0.0, each.name))


def _find_of_schedulers(opened: ExitStack) -> Iterator[Leftover]:
    """Ask all schedulers. One that fails is named in a line, and one that cannot be asked here is left out."""
    for name in list_properties():
        try:
            scheduler = create_scheduler(name)
            opened.callback(close_quietly, name, scheduler)
            yield from scheduler.find_leftovers()
        except ControlError as error:  # noqa: PERF203  # the others' are removed all the same
            logger.log(logging.INFO if error.exit_code is CommandExit.USAGE else logging.WARNING, "%s", error)
        except Exception as error:  # noqa: BLE001  # another package's
            logger.warning("%s: %s", name, describe_error(error))


def _find_unpacked_agents() -> Iterator[Leftover]:
    """Return the agents that jobs of this machine have unpacked, and that no process runs from."""
    for base in bundle_start.find_bases():
        for used_s, folder in bundle_start.list_unpacked(base):
            try:
                if bundle_start.is_used(folder):
                    continue
            except OSError:
                continue
            yield Leftover(
                name=folder,
                what="an unpacked agent that no job uses",
                size_bytes=measure_folder(Path(folder)),
                ended_s=used_s,
                remove=lambda folder=folder: bundle_start.remove_unused(folder),  # type: ignore[misc]
            )


def _find_logs_of_agents(folder: Path) -> Iterator[Leftover]:
    """Log folders of agents that were started by hand, without `--log-dir`, and have ended with something to read."""
    for path in folder.glob("muster_*"):
        try:
            is_ours = _AGENT_LOGS.fullmatch(path.name) and path.lstat().st_uid == os.geteuid() and not path.is_symlink()
            if not is_ours or not any(path.glob("*/attempt_*")):
                continue
            check_folder(path, "")
            with _lock_ended(path):
                has_failed = any(path.glob("*/report.json"))
                times = (each.stat(follow_symlinks=False).st_mtime for each in walk_files(path))
                ended_s = max(times, default=path.stat().st_mtime)
        except OSError:  # it runs, is being removed, or another user could have put it there
            continue
        yield Leftover(
            name=str(path),
            what=f"{'failed: ' if has_failed else ''}logs of a job started by hand",
            size_bytes=measure_folder(path),
            ended_s=ended_s,
            remove=lambda path=path: _remove_ended(path),  # type: ignore[misc]
        )


@contextmanager
def _lock_ended(path: Path) -> Iterator[None]:
    """Hold the locks that an agent has while it lives: of the folder, and of its node's folder in it.

    Raises:
        OSError: an agent has one, or the file system has no locks.
    """
    with ExitStack() as stack:
        for each in (path, *path.glob("**/.lock")):
            fd = os.open(each, os.O_RDONLY | os.O_NOFOLLOW)
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _remove_ended(path: Path) -> None:
    with _lock_ended(path):
        remove_folder(path)
