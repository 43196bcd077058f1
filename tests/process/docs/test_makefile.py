"""What `make` does on a fresh machine, as it prints it."""

import itertools
import re
import shlex
import subprocess

import doc_pages


def test_what_is_installed_is_said_first_and_is_what_the_project_names():
    command = ["make", "--dry-run", "--always-make", "environments"]
    lines = subprocess.run(command, cwd=doc_pages.ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    installs = [(above, shlex.split(line)) for above, line in itertools.pairwise(lines) if " pip " in line]
    assert len(installs) == 4
    for above, words in installs:
        assert re.match(rf'echo "{words[0].partition("/")[0]}: installing \w.+"$', above), words
    extras = re.findall(r"^([a-z]+) = \[", (doc_pages.ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    named = {name for _, words in installs for word in words for name in word.removeprefix(".").strip("[]").split(",")}
    assert {"all", "test", "clients", "docs", "package"} <= named & set(extras)
