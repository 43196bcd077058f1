"""A cold and a warm worker behave like `python script args`: one probe program per item. Ends: `test_end_programs`."""

import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from fidelity import PROBES, Probe, compare, compare_all


def test_main_of_a_script(tmp_path: Path) -> None:
    names = ("main_module.py", "./main_module.py", "../fidelity/main_module.py", str(PROBES / "main_module.py"))
    compare_all([Probe(target=name, args=("-x", "two words", "")) for name in names], tmp_path)


def test_modules(tmp_path: Path) -> None:
    names = ("main_module", "package", "package.__main__", "children", "package.failing", "no_such", "package.no_such")
    compare_all([Probe(kind="module", target=name, args=("--flag",)) for name in (*names, "syntax_error")], tmp_path)


def test_main_of_a_link_a_folder_and_a_zip(tmp_path: Path) -> None:
    link, folder, archive = (tmp_path / name for name in ("link.py", "folder", "archive.zip"))
    link.symlink_to(PROBES / "main_module.py")
    folder.mkdir()
    shutil.copy(PROBES / "main_module.py", folder / "__main__.py")
    with zipfile.ZipFile(archive, "w") as file:
        file.write(PROBES / "main_module.py", "__main__.py")
    relative = [os.path.relpath(path, PROBES) for path in (folder, archive)]
    compare_all([Probe(target=str(path)) for path in (link, folder, archive, *relative)], tmp_path / "shown")


def test_main_of_compiled_code(tmp_path: Path) -> None:
    import py_compile

    source = tmp_path / "source.py"
    source.write_text("import sys\nprint(__file__, __cached__, type(__loader__).__name__, sys.argv)\n1/0\n")
    compiled = tmp_path / "compiled.pyc"
    py_compile.compile(str(source), str(compiled))
    compare(Probe(target=str(compiled)), tmp_path)


@pytest.mark.parametrize(
    "flags",
    [
        ("-X", "dev"),
        ("-I",),
        ("-sE", "-O", "-B"),
        ("-Werror::UserWarning", "-W", "ignore::DeprecationWarning", "-Xsome=thing", "-X", "utf8"),
        ("-P",) if sys.version_info >= (3, 11) else ("-q",),
    ],
    ids=" ".join,
)
def test_options_of_the_interpreter(flags: tuple[str, ...], tmp_path: Path) -> None:
    compare(Probe(target="main_module.py", flags=flags), tmp_path)


def test_a_forked_child_that_fails_records_nothing(tmp_path: Path) -> None:
    probe = Probe(target="exits.py", args=("fork_fails",))
    compare(probe, tmp_path)
    assert not (tmp_path / "warm" / "0.0.json").exists()
    assert not (tmp_path / "cold" / "0.0.json").exists()


def test_programs(tmp_path: Path) -> None:
    names = ("syntax_error.py", "latin.py", "no_such.py", "streams.py", "children.py")
    compare_all([Probe(target=name) for name in names], tmp_path)


@pytest.mark.parametrize("env", [{}, {"LC_ALL": "", "LANG": "C", "PYTHONIOENCODING": ""}], ids=["own", "C locale"])
def test_process_state(env: dict[str, str], tmp_path: Path) -> None:
    compare(Probe(target="process_state.py", env=env), tmp_path)


def test_process_state_that_the_agent_was_given(tmp_path: Path) -> None:
    """A worker inherits from the agent's own start: below nohup, with limits."""
    given = ("sh", "-c", "trap '' HUP; umask 027; ulimit -n 777; exec \"$@\"", "sh")
    env = {"TMPDIR": str(tmp_path), "PYTHONIOENCODING": "latin-1", "PWD": str(PROBES)}  # a shell sets PWD
    compare(Probe(target="process_state.py", env=env, prefix=given), tmp_path)
    text = (tmp_path / "warm" / "0.0.out").read_text()
    assert "dispositions {1: '1'" in text
    assert "(777, 777)" in text
    assert "['Umask:', '0027']" in text


def test_descriptors_that_the_agent_was_given(tmp_path: Path) -> None:
    """Workers do not get them; plain Python would."""
    given = ("sh", "-c", 'exec 7</dev/null; exec "$@"', "sh")
    compare(Probe(target="process_state.py", prefix=given), tmp_path, plain=False)
    assert "descriptors [0, 1, 2]\n" in (tmp_path / "warm" / "0.0.out").read_text()


def test_recursion(tmp_path: Path) -> None:
    """Not compared with plain Python: three frames of ours lie below."""
    compare(Probe(target="exits.py", args=("recursion",)), tmp_path, plain=False)
