"""Which variables a process reads until it has imported torch: a fork of it no longer takes another value of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from muster.agent.workers.warm.fork_safety import is_read_early

HARMLESS = {
    "PATH": "the interpreter finds itself by it; a template of another interpreter is not used",
    "__PYVENV_LAUNCHER__": "likewise, on macOS",
}
WATCHED = {"tqdm/utils.py": "looks through all names for those with its prefix, which is on the list"}
"""Files that may read all variables."""
LIBRARY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

static char *(*find(const char *function))(const char *) {
    return (char *(*)(const char *))dlsym(RTLD_NEXT, function);
}

static void record(const char *name) {
    static int fd = -2;
    char line[256];
    size_t size = strnlen(name, sizeof line - 1);
    if (fd == -2) {
        const char *path = find("getenv")("READ_LOG");
        fd = path == NULL ? -1 : open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    }
    if (fd < 0) return;
    memcpy(line, name, size);
    line[size] = '\n';
    if (write(fd, line, size + 1) < 0) _exit(3);
}

char *getenv(const char *name) { record(name); return find("getenv")(name); }
char *secure_getenv(const char *name) { record(name); return find("secure_getenv")(name); }
"""
PROGRAM = """
import os, sys
def find_reader():
    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith("<frozen") or frame.f_code.co_filename == os.__file__:
        frame = frame.f_back
    return frame.f_code.co_filename
class Watched(type(os.environ)):
    def __getitem__(self, name):
        if sys._getframe(1).f_code.co_name != "__iter__":
            os.write(log, f"{name}\\n".encode())
        return super().__getitem__(name)
    def __iter__(self):
        os.write(log, f"all by {find_reader()}\\n".encode())
        return super().__iter__()
log = os.open(os.environ["READ_LOG"], os.O_WRONLY | os.O_APPEND)
os.environ.__class__ = Watched
import torch
os._exit(0)
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_all_that_is_read_until_torch_is_imported_is_known(tmp_path: Path) -> None:
    (tmp_path / "watch.c").write_text(LIBRARY)
    made = tmp_path / "watch.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", made, tmp_path / "watch.c", "-ldl"], check=True)
    log = tmp_path / "log"
    env = {**os.environ, "LD_PRELOAD": str(made), "READ_LOG": str(log)}
    subprocess.run([sys.executable, "-c", PROGRAM], env=env, check=True, timeout=300)
    lines = set(log.read_text().splitlines())
    readers = {line.removeprefix("all by ") for line in lines if line.startswith("all by ")}
    names = {line for line in lines if not line.startswith("all by ")}
    assert names >= {"OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL", "PYTHONPATH", "TORCH_LOGS"}, "both kinds were watched"
    assert {reader for reader in readers if not reader.endswith(tuple(WATCHED))} == set()
    assert {name for name in names if not is_read_early(name)} - HARMLESS.keys() - {"READ_LOG"} == set()
