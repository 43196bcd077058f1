"""Unpacks the workspace that came with the job, before anything else happens on the node."""

import os
import posixpath
import shutil
import tarfile

from muster.agent.errors import EnvironmentFault


def unpack_workspace(bundle_path: str, into_dir: str) -> None:
    """Unpack a workspace bundle into a folder; other files in it stay.

    Nothing is written outside `into_dir`. Names are checked, and no entry is written through a symbolic link. Links of
    the archive are made last, and links that existed before are replaced. Links themselves may point anywhere, as they
    did where they were packed.

    Args:
        bundle_path: a tar.gz of `schedulers/workspace/packing.py`.
        into_dir: created if missing.

    Raises:
        EnvironmentFault: the bundle is missing or broken, or the folder cannot be written.
    """
    try:
        os.makedirs(into_dir, exist_ok=True)
        with tarfile.open(bundle_path, "r:gz") as bundle:
            links = [entry for entry in bundle if not _unpack_entry(bundle, entry, into_dir)]
        for entry in links:
            _make_link(entry, into_dir)
    except (OSError, EOFError, tarfile.TarError) as error:
        raise EnvironmentFault(f"cannot unpack the workspace {bundle_path!r} into {into_dir!r}: {error}") from error


def _unpack_entry(bundle: tarfile.TarFile, entry: tarfile.TarInfo, into_dir: str) -> bool:
    """Write a file or folder, and return False for a link, which must wait."""
    if entry.issym():
        return False
    target = _target(entry.name, into_dir)
    if entry.isdir():
        _make_folder(target)
        os.chmod(target, (entry.mode & 0o777) | 0o700)
        return True
    source = bundle.extractfile(entry) if entry.isreg() else None
    if source is None:
        raise tarfile.ExtractError(f"{entry.name!r} is neither a file, a folder nor a symbolic link")
    _make_parents(entry.name, into_dir)
    _clear(target)
    with source, open(target, "xb") as out:
        shutil.copyfileobj(source, out)
    os.chmod(target, entry.mode & 0o777)
    os.utime(target, (entry.mtime, entry.mtime))
    return True


def _make_link(entry: tarfile.TarInfo, into_dir: str) -> None:
    target = _target(entry.name, into_dir)
    _make_parents(entry.name, into_dir)
    _clear(target)
    os.symlink(entry.linkname, target)


def _target(name: str, into_dir: str) -> str:
    parts = name.split("/")
    if posixpath.isabs(name) or ".." in parts or posixpath.normpath(name) == ".":
        raise tarfile.ExtractError(f"{name!r} would be written outside the folder")
    return os.path.join(into_dir, *parts)


def _make_parents(name: str, into_dir: str) -> None:
    path = into_dir
    for part in posixpath.dirname(name).split("/"):
        if part:
            path = os.path.join(path, part)
            _make_folder(path)


def _make_folder(path: str) -> None:
    if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
        os.unlink(path)
    os.makedirs(path, exist_ok=True)


def _clear(path: str) -> None:
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
    elif os.path.isdir(path):
        raise tarfile.ExtractError(f"{path!r} is a folder at the destination and a file in the workspace")
