"""Removes folders with all that is in them, of any depth: `shutil.rmtree` and `os.walk` have the limit of recursion.

It is also sent to nodes, as a part of a program.
"""

import contextlib
import errno
import os


def remove_folder(folder: str | os.PathLike[str], *, ignores_errors: bool = False) -> None:
    """Remove a folder with all that is in it.

    Args:
        folder: its path.
        ignores_errors: what cannot be removed stays.

    Raises:
        OSError: it cannot be removed.
    """
    import shutil  # the agent's start needs neither
    import subprocess

    try:
        shutil.rmtree(folder, ignore_errors=ignores_errors)
        if not ignores_errors or not os.path.lexists(folder):
            return
    except RecursionError:
        pass
    except OSError as error:
        if error.errno != errno.EMFILE:  # it has one open for each level
            raise
    with contextlib.suppress(*((OSError,) if ignores_errors else ())):
        done = subprocess.run(["rm", "-rf", "--", folder], capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(errno.EIO, done.stderr.strip().splitlines()[-1], os.fspath(folder))
