"""Whether the program of a job exists."""

import pytest

from muster._shared.programs import explain_missing


@pytest.fixture
def cwd(tmp_path, monkeypatch):
    (tmp_path / "pack" / "sub").mkdir(parents=True)
    for name in ("main.py", "pack/__init__.py", "pack/there.py", "pack/sub/deep.py"):
        (tmp_path / name).write_text("raise RuntimeError('it was imported')\n")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("script", "main.py"),
        ("script", "/etc/passwd"),
        ("script", "pack"),
        *(("module", name) for name in ("main", "pack", "pack.there", "pack.sub.deep", "email.mime", "sys")),
    ],
)
def test_what_exists(kind, target, cwd) -> None:
    assert explain_missing(kind, target, cwd) is None


@pytest.mark.parametrize(
    ("kind", "target"), [("script", "no.py"), *(("module", name) for name in ("no", "pack.no", "main.no", "email.no"))]
)
def test_what_does_not_exist_is_one_line(kind, target, cwd) -> None:
    line = explain_missing(kind, target, cwd)
    assert line is not None
    assert target in line
    assert cwd in line
    assert "\n" not in line


def test_a_package_that_chooses_its_own_folders_is_believed(cwd, tmp_path) -> None:
    (tmp_path / "pack" / "__init__.py").write_text("__path__.append('/elsewhere')\n")
    assert explain_missing("module", "pack.anything", cwd) is None
