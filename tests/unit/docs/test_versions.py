"""The table of versions: what the project declares, what CI runs and what the code refuses."""

import re

import doc_pages
import yaml

from muster.schedulers.kubernetes.schema import MINIMUM, MINIMUM_ELASTIC, load_table


def read(path):
    return (doc_pages.ROOT / path).read_text()


PYTHONS = re.findall(r'Python :: (3\.\d+)"', read("pyproject.toml"))


def find(pattern, path):
    """What the pattern's group finds there, once or more, and always the same."""
    (found,) = set(re.findall(pattern, read(path), re.MULTILINE))
    return found


def read_table():
    """The cells of each row, by its first word."""
    section = read("docs/getting-started.md").partition("## Versions\n")[2].partition("\n## ")[0]
    rows = [row.strip("| ").split(" | ") for row in section.splitlines() if row.startswith("| ")]
    return {row[0].partition(",")[0]: row[1:] for row in rows[1:]}


def test_every_version_is_that_of_the_project():
    python, torch, torchx = (find(rf'{name}>=([^"]+)"', "pyproject.toml") for name in ('python = "', "torch", "torchx"))
    tried = find(r"^TORCH \?= torch==(\d+\.\d+)", "Makefile")
    stable, nightly = find(r"^TORCHX := torchx==(\S+)", "Makefile"), find(r"torchx-nightly==(\S+)", "Makefile")
    with_gpu = find(r"H100, with torch (\d+\.\d+)", "docs/gpus-and-nccl.md")
    least, elastic, newest = (".".join(map(str, each)) for each in (MINIMUM, MINIMUM_ELASTIC, load_table().newest))
    cluster = find(r"on Kubernetes (\d+\.\d+)", "docs/guarantees.md")
    assert read_table() == {
        "Python": [f"{python} or newer", f"{PYTHONS[0]} to {PYTHONS[-1]}"],
        "torch": [f"{torch} or newer", f"{tried}; with a GPU {with_gpu}"],
        "TorchX": [f"{torchx}, or its nightly line", f"{stable}, nightly {nightly}"],
        "Kubernetes": [f"{least} or newer, elastic jobs {elastic}", f"{cluster}; schemas of {least} to {newest}"],
        "Slurm": ["not known", find(r"Slurm (\d+\.\d+) of Debian", "docs/guarantees.md")],
    }


def test_ci_runs_every_python():
    jobs = yaml.safe_load(read(".github/workflows/tests.yml"))["jobs"]
    assert jobs["check"]["strategy"]["matrix"]["python"] == PYTHONS
    (installed,) = (step["with"]["python-version"] for step in jobs["package"]["steps"] if "with" in step)
    assert installed.split() == PYTHONS
