"""The generated pages of the reference: they hold every flag, option, parameter, event and exit code."""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest

from muster._shared.contract import Env, ExitCode
from muster.agent.cli.flag_table import FLAGS
from muster.components import dist
from muster.schedulers import adapter
from muster.schedulers.runner.option_records import list_options

ROOT = Path(__file__).resolve().parents[3]
OWN_SENTENCES = {"j", "h"}
"""Parameters whose meaning is not the same in all three components."""


@pytest.fixture(scope="module")
def pages():
    spec = importlib.util.spec_from_file_location("reference_pages", ROOT / "docs/reference_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_in_the_repository_are_those_that_the_code_gives(pages):
    """A checkout and GitHub show them; `python docs/reference_pages.py` writes them."""
    for name, text in pages.build_pages().items():
        assert (ROOT / f"docs/reference/{name}.md").read_text() == text, name


def test_every_flag_has_its_place(pages):
    text = pages.build_flags()
    for flag in FLAGS:
        assert re.search(rf"^- .*`--{flag.name}[` ]", text, re.MULTILINE), flag.name
        assert (f"`{flag.variable}`" in text) == flag.has_variable


def test_every_option_has_a_row(pages):
    text = pages.build_options()
    for each in pages.list_adapters().values():
        for field, option in list_options(each.option_record).items():
            assert f"\n- `{option.name or field}`" in text


def test_every_parameter_has_a_sentence(pages):
    for component in pages.COMPONENTS:
        *_, sentences = pages.read_docstring(component)
        assert list(sentences) == list(inspect.signature(component).parameters)
        for name, sentence in sentences.items():
            assert len(sentence.split()) > 2, f"{component.__name__}: {name}"


def test_resources_and_mounts_are_shown_by_example(pages):
    *_, sentences = pages.read_docstring(dist.ddp)
    assert "--gpu 8" in sentences["gpu"]
    assert "-h aws_p4d.24xlarge" in sentences["h"]
    assert "type=bind,src=/data,dst=/data,readonly" in sentences["mounts"]
    assert "type=volume,src=" in sentences["mounts"]


def test_ddp_and_torchrun_have_one_signature():
    assert inspect.signature(dist.ddp) == inspect.signature(dist.torchrun)


def test_what_spmd_shares_is_the_same(pages):
    shared = inspect.signature(dist.ddp).parameters
    *_, theirs = pages.read_docstring(dist.ddp)
    *_, ours = pages.read_docstring(dist.spmd)
    for name, parameter in inspect.signature(dist.spmd).parameters.items():
        if name in OWN_SENTENCES or name == "args":
            continue
        assert parameter == shared[name], name
        assert ours[name] == theirs[name], name
    assert ours["args"] == theirs["script_args"]


def test_docstrings_of_ddp_and_torchrun_differ_in_one_sentence(pages):
    *_, theirs = pages.read_docstring(dist.ddp)
    *_, ours = pages.read_docstring(dist.torchrun)
    assert {name for name in ours if ours[name] != theirs[name]} == {"j"}


def test_every_event_that_the_agent_writes_is_explained(pages):
    agent = ROOT / "muster/agent"
    source = "".join(path.read_text() for folder in ("node", "workers") for path in (agent / folder).rglob("*.py"))
    written = set(re.findall(r"""_?(?:event_)?log\.write\(\s*"(\w+)\"""", source))
    assert len(written) > 15
    assert written <= set(pages.list_events())


def test_every_exit_code_is_explained(pages):
    text = pages.build_exit_codes()
    for code in ExitCode:
        assert re.search(rf"^\| {int(code)} \| {code.name} \| \w.+ \|$", text, re.MULTILINE), code


def test_variables_are_explained(pages):
    text = pages.build_environment()
    rows = [line for line in text.splitlines() if line.startswith("- `")]
    assert len(rows) > 10
    for row in rows:
        assert re.match(r"- `[A-Z0-9_]+`: \S", row), row
    for value in vars(Env).values():
        assert not isinstance(value, str) or not value.startswith("MUSTER_") or f"`{value}`" in text


def test_every_name_for_adapters_is_there(pages):
    text = pages.build_adapter()
    assert sorted(re.findall(r"`(\w+)`", "".join(re.findall(r"^- (.*?):", text, re.MULTILINE)))) == adapter.__all__


@pytest.mark.parametrize(
    ("text", "shortened"),
    [
        ("One sentence of some length. Another.", "One sentence of some length. Another."),
        ("Few words. " + "Word " * 30 + "end.", "Few words. " + "Word " * 30 + "end."),
        ("What counts is explained here. " + "Word " * 30 + "end.", "What counts is explained here."),
        ("What is counted. 0: never, " + "word " * 30, "What is counted. 0: never, " + "word " * 30),
    ],
)
def test_long_texts_are_cut_at_a_sentence(text, shortened, pages):
    assert pages.shorten(text) == shortened


def test_text_is_shown_unchanged(pages):
    assert pages._escape("a_b <c> `d_e` [f]*") == r"a\_b \<c\> `d_e` \[f\]\*"
