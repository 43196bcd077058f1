"""Sends what TorchInductor and Triton have compiled to a node that joins a running job, which then need not compile it.

The new node asks its neighbour while its workers start, and they do not wait: if anything fails, they compile. Code is
loaded from these folders. So nothing is read from or written to a folder that another user can write to. No link is
followed, no file is replaced, and a file appears only when all of it is there. What one machine has compiled may not
run on another kind of machine; then nothing is sent.
"""

import contextlib
import hashlib
import os
import pwd
import re
import stat
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Final, NamedTuple

from muster._shared.preflight.versions import read_versions
from muster.agent.rendezvous.interface import Stream
from muster.agent.snapshots.memory import Extent
from muster.agent.snapshots.transfer import TransferError, check_end, read_counts, receive_blocks, send_extents

LIMIT_BYTES: Final = 64 * 1000 * 1000
"""Limit on what one node sends. Of larger caches, it sends what was compiled last."""
_MOST_FILES: Final = 10_000
_MOST_LOOKED: Final = 50_000
"""The most files of one cache that are looked at. Each takes some 10 us."""
_SETTLED_S: Final = 5.0
"""A file that was written to more recently may be incomplete, because compilers and linkers write some in place."""
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PROCESSOR: Final = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")


class CachedFile(NamedTuple):
    """One file of a cache."""

    cache: str
    path: str
    """The path below the cache's folder."""
    size_bytes: int
    is_executable: bool
    changed_ns: int = 0


def find_folders(env: Mapping[str, str]) -> dict[str, str]:
    """Return the folders of the workers' caches.

    Source: `torch._inductor.runtime.cache_dir_utils` of torch 2.13, `triton.knobs` of Triton 3.5.
    """
    temporary = next((env[name] for name in ("TMPDIR", "TEMP", "TMP") if env.get(name)), "/tmp")  # noqa: S108
    user = next((env[name] for name in ("LOGNAME", "USER", "LNAME", "USERNAME") if env.get(name)), "")
    if not user:
        try:
            user = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            user = f"uid_{os.getuid()}"
    user = re.sub(r'[\\/:*?"<>|]', "_", user)
    home = env.get("TRITON_HOME") or env.get("HOME") or "/"
    return {
        "inductor": os.path.abspath(env.get("TORCHINDUCTOR_CACHE_DIR") or f"{temporary}/torchinductor_{user}"),
        "triton": os.path.abspath(env.get("TRITON_CACHE_DIR") or f"{home}/.triton/cache"),
    }


def describe_machine() -> str:
    """Return what two nodes must have in common, so that one may load what the other has compiled for itself."""
    facts = [str(os.geteuid()), os.uname().machine, str(os.confstr("CS_GNU_LIBC_VERSION")), str(read_versions())]
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        first = file.read(1 << 14).split("\n\n")[0]  # `-march=native` uses all processor features
        facts += [line for line in first.splitlines() if line.startswith(_PROCESSOR)]
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=16).hexdigest()


# -- for another node --------------------------------------------------------------------------------------------------


def serve(stream: Stream, message: dict[str, object], env: Mapping[str, str]) -> None:
    """List what is here, and send what the other node lacks. This takes at most half of a core.

    Raises:
        OSError, ProtocolError: the connection broke, or a file no longer exists.
        TransferError: the other node is of another kind, or asks for what was not listed.
    """
    if message.get("machine") != describe_machine():
        raise TransferError("the nodes have other processors, users or versions")
    folders = find_folders(env)
    files = list_files(folders)
    stream.send({"files": [[each.cache, each.path, each.size_bytes, each.is_executable] for each in files]})
    for number in read_counts(stream.receive(), "want"):
        if number >= len(files):
            raise TransferError("there is no such file")
        _send_file(stream, folders, files[number])


def list_files(folders: Mapping[str, str]) -> list[CachedFile]:
    """Return the complete files of the caches, newest first, up to the limit."""
    found: list[CachedFile] = []
    for cache, folder in folders.items():
        with contextlib.suppress(OSError, TransferError):
            fd = _open_own(folder)
            try:
                found += islice(_walk(cache, fd), _MOST_LOOKED)
            finally:
                os.close(fd)
    found.sort(key=lambda each: each.changed_ns, reverse=True)
    total, chosen = 0, found[:_MOST_FILES]
    for number, each in enumerate(chosen):
        total += each.size_bytes
        if total > LIMIT_BYTES:
            return chosen[:number]
    return chosen


def _walk(cache: str, root_fd: int) -> Iterator[CachedFile]:
    latest_ns = time.time_ns() - int(_SETTLED_S * 1e9)
    for parent, folders, names, fd in os.fwalk(".", dir_fd=root_fd):
        folders[:] = [each for each in folders if not each.startswith((".", "tmp."))]
        for name in names:
            if name.startswith(".") or name.endswith((".tmp", ".lock")):
                continue
            with contextlib.suppress(OSError):
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                path = os.path.normpath(os.path.join(parent, name))
                is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
                if is_ours and status.st_size and status.st_mtime_ns < latest_ns and _is_path(path):
                    is_executable = bool(status.st_mode & stat.S_IXUSR)
                    yield CachedFile(cache, path, status.st_size, is_executable, status.st_mtime_ns)


def _send_file(stream: Stream, folders: Mapping[str, str], file: CachedFile) -> None:
    *parents, name = file.path.split("/")
    folder_fd = _open_below(_open_own(folders[file.cache]), parents, makes=False)
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
    finally:
        os.close(folder_fd)
    try:
        send_extents(stream, [Extent(fd, 0, file.size_bytes)], None, None, is_gentle=True)
        status = os.fstat(fd)
        stream.send({"end": (status.st_size, status.st_mtime_ns) == (file.size_bytes, file.changed_ns)})
    finally:
        os.close(fd)


# -- from another node -------------------------------------------------------------------------------------------------


def fetch(stream: Stream, host: str, env: Mapping[str, str]) -> str:
    """Get what this node's caches lack, as far as it comes. Close the stream, and return a line about it, or ""."""
    count = total = 0
    try:
        stream.send({"do": "compile-caches", "machine": describe_machine()})
        folders = find_folders(env)
        files = read_files(stream.receive())
        wanted = [number for number, each in enumerate(files) if _lacks(folders[each.cache], each.path)]
        if wanted:
            stream.send({"want": wanted})
        for number in wanted:
            _receive_file(stream, folders[files[number].cache], files[number])
            count, total = count + 1, total + files[number].size_bytes
    except Exception:  # noqa: BLE001, S110  # what is missing is compiled here: no fault of this may end a job
        pass
    finally:
        stream.close()
    got = "1 file" if count == 1 else f"{count} files"
    return f"got {got} ({total / 1e6:.1f} MB) of compile caches from {host}" if count else ""


def read_files(message: dict[str, object]) -> list[CachedFile]:
    """Read what another node has.

    Raises:
        TransferError: a path leaves the cache, the list is too long, or it is no list.
    """
    rows, found = message.get("files"), []
    for row in rows if isinstance(rows, list) else [rows]:
        match row:
            case ["inductor" | "triton" as cache, str(path), int(size), bool(is_executable)] if size > 0:
                found.append(CachedFile(cache, path, size, is_executable))
            case _:
                raise TransferError("'files' is not what it must be")
    if not all(_is_path(each.path) for each in found):
        raise TransferError("a path leaves the cache")
    if len(found) > _MOST_FILES or sum(each.size_bytes for each in found) > LIMIT_BYTES:
        raise TransferError("it is more than a node may send")
    return found


def _is_path(path: str) -> bool:
    """Return whether the path stays below a folder, and suits every file system and console."""
    parts = path.split("/")
    return path.isascii() and path.isprintable() and len(path) < 1024 and not {"", ".", ".."} & {*parts}


def _lacks(folder: str, path: str) -> bool:
    return not os.path.lexists(f"{folder}/{path}")


def _receive_file(stream: Stream, folder: str, file: CachedFile) -> None:
    os.makedirs(folder, mode=0o700, exist_ok=True)
    *parents, name = file.path.split("/")
    folder_fd = _open_below(_open_own(folder), parents, makes=True)
    temporary = f".muster-{os.urandom(8).hex()}.tmp"
    try:
        mode, flags = 0o700 if file.is_executable else 0o600, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(temporary, flags, mode, dir_fd=folder_fd)
        try:
            with open(fd, "wb") as into:
                receive_blocks(stream, file.size_bytes, lambda block: _write(into.write(block)))
                check_end(stream)
            with contextlib.suppress(FileExistsError):  # just compiled here
                os.link(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd, follow_symlinks=False)
        finally:
            os.unlink(temporary, dir_fd=folder_fd)
    finally:
        os.close(folder_fd)


def _write(_count: int) -> None:
    """Write all of a buffered file, or raise OSError."""


def _open_own(folder: str) -> int:
    """Open a folder of this user to which no other user can write.

    Raises:
        OSError: it does not exist, or is a link.
        TransferError: it is another user's, or another user can write to it.
    """
    fd = os.open(folder, _FOLDER)
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(fd)
        raise TransferError(f"other users can write to {folder}")
    return fd


def _open_below(fd: int, parents: list[str], *, makes: bool) -> int:
    """Open a folder below an open one, and close the open one. No link is followed."""
    for part in parents:
        try:
            if makes:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=fd)
            below = os.open(part, _FOLDER, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    return fd
