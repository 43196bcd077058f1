"""`.torchxignore` has the rules of `.gitignore`: git itself says what they are."""

import os
import shutil
import subprocess

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from muster.schedulers.workspace import packing as workspace_packing

CHARACTERS = [
    "a",
    "b",
    "c",
    "*",
    "**",
    "?",
    "/",
    "!",
    "[ab]",
    "[!a]",
    "[^b]",
    "[a-b]",
    "[[:alpha:]]",
    "\\a",
    "\\*",
    ".",
]
WHOLE = (
    *("build/", "/a", "a/", "*", "!a", "!a/", "!a/b", "!a/**", "**/b", "a/**", "a/**/c", "#a", "\\#", "[a", "a\\", "]"),
    *("a*c", "!", "/", "**", "!**/", "[]a]", "[a-", "[b-a]", "[]-a]", "[\\]]", "a**b", "/**", "**/a/", "./a", "a//b"),
)
LINES = st.one_of(st.sampled_from(WHOLE), st.lists(st.sampled_from(CHARACTERS), max_size=5).map("".join))
NAMES = st.lists(
    st.lists(st.sampled_from(["a", "b", "ab", "c", "build", "]", "[a", "-"]), min_size=1, max_size=3).map("/".join),
    min_size=1,
    max_size=8,
)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@given(lines=st.lists(LINES, max_size=5), names=NAMES)
@example(lines=["*", "!a", "!a/b"], names=["a/b", "a/c", "b"])
@example(lines=["\ufeffa", "b\x0bc", "d\x85", "e\u2028f", "g\r"], names=["a", "b", "c", "d", "f", "g"])
@example(lines=["***/a", "b/***"], names=["a", "c/a", "b/c/a", "d"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_same_files_as_with_git(tmp_path_factory, lines, names):
    root = tmp_path_factory.mktemp("tree")
    for name in names:
        parents = [root.joinpath(*name.split("/")[:depth]) for depth in range(1, name.count("/") + 1)]
        if any(parent.is_file() for parent in parents) or (root / name).exists():
            continue
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    (root / ".torchxignore").write_bytes("\n".join(lines).encode())
    env = {"PATH": os.environ["PATH"], "HOME": str(root), "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["git", "init", "-q", root], env=env, check=True)
    command = ["git", "-C", root, "ls-files", "-z", "--others", f"--exclude-from={root}/.torchxignore"]
    listed = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    files = {name for name in workspace_packing.walk_workspace(root) if (root / name).is_file()}
    assert {name for name in files if not name.startswith(".git/")} == set(listed.split("\0")) - {""}
