"""What holds for the pages as texts: links inside the repository, blocks and their marks."""

import re
from collections import Counter

import doc_pages
import pytest
import yaml

from muster._shared.contract import Env
from muster.cli.commands import COMMANDS
from muster.schedulers.docker.options import DockerOptions
from muster.schedulers.held.remote import HeldOptions
from muster.schedulers.kubernetes.options import Options as KubernetesOptions
from muster.schedulers.local.options import LocalOptions
from muster.schedulers.runner.option_records import list_options
from muster.schedulers.slurm.options import SlurmOptions
from muster.schedulers.ssh.options import SshOptions

PAGES = doc_pages.list_pages()
CELL_LIMIT = 15  # words
FOR_TESTS = {"MUSTER_REQUIRE", "MUSTER_TEST_IMAGE", "MUSTER_TIME_SCALE"}
_LINK = re.compile(r"\[[^\]\n]*(?:\n[^\]\n]*)?\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^(`{3,}).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_INCLUDED = re.compile(r"^```\{include\} (\S+)$", re.MULTILINE)
_HEADING = re.compile(r"^#{1,4} (.+)$", re.MULTILINE)


def read_text(page):
    """A page without its blocks and without code in the line."""
    text = _FENCED.sub("", (doc_pages.ROOT / page).read_text())
    return re.sub(r"`[^`\n]*`", lambda found: found[0] if "](" not in found[0] else "", text)


def list_anchors(path):
    """The anchors that Sphinx and GitHub give to a page's headings."""
    text = path.read_text()
    included = [(path.parent / name).read_text() for name in _INCLUDED.findall(text)]
    titles = [title for each in (text, *included) for title in _HEADING.findall(_FENCED.sub("", each))]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in _LINK.findall(read_text(page)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        path = (doc_pages.ROOT / page).parent / name if name else doc_pages.ROOT / page
        assert path.exists(), f"{page} links to {target}"
        assert not anchor or anchor in list_anchors(path), f"{page} links to {target}"


@pytest.mark.parametrize("page", PAGES)
def test_no_link_leads_to_a_page_that_only_includes_a_file(page):
    """Its text shows nothing in a checkout; `docs/conf.py` lets links to the file lead to this page of the site."""
    for target in _LINK.findall(read_text(page)):
        path = (doc_pages.ROOT / page).parent / target.partition("#")[0]
        is_page = path.suffix == ".md" and path.exists()
        assert not is_page or not path.read_text().startswith("```{include}"), f"{page} links to {target}"


@pytest.mark.parametrize("page", PAGES)
def test_no_block_is_hidden_from_the_tests(page):
    lines = _FENCED.sub("", (doc_pages.ROOT / page).read_text()).splitlines()
    indented = [
        line
        for above, before, line in zip(lines, lines[1:], lines[2:], strict=False)
        if line.startswith("    ") and not before.strip() and not above.startswith((" ", "-"))
    ]
    assert indented == []


def test_drawings_are_no_wider_than_the_site_shows():
    """See docs/static/blocks.css."""
    for block in (block for page in PAGES for block in doc_pages.read_blocks(page)):
        if block.language in doc_pages.DRAWINGS:
            assert max(map(len, block.text.splitlines())) <= 107, block.where


def read_groups():
    """The groups of the navigation, with the pages of each."""
    text = (doc_pages.ROOT / "docs/index.md").read_text()
    groups = re.findall(r":caption: (.+)\n:maxdepth: 1\n\n((?:.+\n)+?)```", text)
    return {caption: names.split() for caption, names in groups}


def list_guides():
    """The pages of the navigation, but for those of the reference."""
    return [name for group, names in read_groups().items() if group != "Reference" for name in names]


def test_the_navigation_has_six_groups_of_at_most_seven_pages():
    groups = read_groups()
    assert list(groups) == ["Start", "Run", "Watch", "When it breaks", "Survive", "Reference"]
    assert max(map(len, groups.values())) <= 7


def test_the_navigation_names_every_page_once():
    further = re.findall(r":maxdepth: 1\n\n((?:.+\n)+?)```", (doc_pages.ROOT / "docs/reference.md").read_text())
    named = [*(name for names in read_groups().values() for name in names), *"".join(further).split()]
    docs = doc_pages.ROOT / "docs"
    written = {path.relative_to(docs).with_suffix("").as_posix() for path in docs.rglob("*.md")} - {"index"}
    assert sorted(named) == sorted(written)


@pytest.mark.parametrize("name", list_guides())
def test_a_guide_begins_with_a_line_to_run_and_ends_with_the_next_page(name):
    page = f"docs/{name}.md"
    first = next(block for block in doc_pages.read_blocks(page) if block.language in doc_pages.RUNNABLE)
    assert first.line <= 25, first.where
    assert re.match(r"Next: .*\]\([\w-]+\.md", (doc_pages.ROOT / page).read_text().rstrip().split("\n\n")[-1])


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_cells_of_tables_are_short(page):
    text = _FENCED.sub("", (doc_pages.ROOT / page).read_text())
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [re.sub(r"\]\([^)]*\)", "]", cell) for row in rows for cell in row.strip("|").split(" | ")]
    assert [cell for cell in cells if len(cell.split()) > CELL_LIMIT] == []


def test_only_what_needs_more_than_this_machine_is_marked():
    blocks = [block for page in PAGES for block in doc_pages.read_blocks(page)]
    marks = Counter(block.mark for block in blocks if block.language not in doc_pages.DRAWINGS)
    assert set(marks) <= {"", *doc_pages.MARKS}
    assert marks[""] > sum(marks[mark] for mark in doc_pages.MARKS)  # most of them run


def test_the_page_of_the_muster_command_names_every_command():
    text = (doc_pages.ROOT / "docs/muster-command.md").read_text()
    for name in COMMANDS:
        assert re.search(rf"^- `muster {name}\b.*`: \w", text, re.MULTILINE), name


def test_the_map_names_files_that_exist():
    text = (doc_pages.ROOT / "CONTRIBUTING.md").read_text()
    rows = [row for row in text.splitlines() if row.startswith("| ") and "`muster/" in row]
    assert len(rows) > 20
    for row in rows:
        words = re.findall(r"`([\w./]+)`", row)
        folders = [word for word in words if "." not in word]
        for word in words:
            if "/" in word or word.endswith(".py"):
                assert any((doc_pages.ROOT / folder / word).exists() for folder in ("", *folders)), f"{word}: {row}"


def test_options_and_variables_exist():
    records = (HeldOptions, LocalOptions, DockerOptions, KubernetesOptions, SlurmOptions, SshOptions)
    known = {option.name or field for record in records for field, option in list_options(record).items()}
    variables = {value for value in vars(Env).values() if isinstance(value, str)}
    for page in PAGES:
        text = (doc_pages.ROOT / page).read_text()
        for words in re.findall(r"-cfg ([a-z_]+=\S*)", text):
            names = set(re.findall(r"(?:^|,)([a-z_]+)=", words))
            assert names <= known, f"{page}: -cfg {words}"
        named = set(re.findall(r"\bMUSTER_[A-Z0-9_]*[A-Z0-9]\b", text))
        of_roles = {
            name for name in named if name.startswith(("MUSTER_ROLE_LEARNER_HOSTS", "MUSTER_ROLE_LEARNER_PORT_"))
        }
        assert named <= variables | of_roles | FOR_TESTS, page


def test_pages_invent_no_address():
    known = ("github.com/meta-pytorch/torchx", "docs.pytorch.org", "meta-pytorch.org", "kubernetes.io", "kubeflow.org")
    threads = (
        "github.com/pytorch/pytorch/issues/",
        "github.com/pytorch/pytorch/pull/",
        "github.com/ray-project/ray/pull/",
    )
    threads += ("github.com/skypilot-org/skypilot/pull/", "github.com/kubeflow/trainer/issues/")
    for page in PAGES:
        for url in re.findall(r"https?://[^\s)>\"`]+", read_text(page)):
            assert any(part in url for part in known + threads), f"{page}: {url}"


def test_the_workflow_runs_targets_that_exist():
    targets = set(re.findall(r"^([a-z]+):.*## ", (doc_pages.ROOT / "Makefile").read_text(), re.MULTILINE))
    jobs = yaml.safe_load((doc_pages.ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    called = {words[1] for run in runs if (words := run.split())[0] == "make"}
    assert called == {"check", "docs", "package"} <= targets
    assert ".ci/run" in {run.split()[0] for run in runs}  # make test, make soak
