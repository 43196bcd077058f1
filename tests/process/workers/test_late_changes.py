"""What a program changes before its own `import torch`, where the template has imported torch before its first line."""

import os
import sys
from pathlib import Path

import pytest
from harness import Outcome, run_tree

AGENT = (sys.executable, "-m", "muster.agent", "--standalone", "--nproc-per-node", "2")
SHOW = "import sys, torch\nsys.stdout.write(f'{torch.get_num_threads()}\\n')\n"
SHOWN = [str(min(2, os.cpu_count() or 1))] * 2
"""torch runs no more threads than there are cores."""
HIDDEN = "import os\ngetattr(os, 'env' + 'iron')['_'.join(('OMP', 'NUM', 'THREADS'))] = '1'\n"
"""No search of the source finds it."""


def run(folder: Path, *program: str, start: str = "auto") -> Outcome:
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    return run_tree([*AGENT, "--start", start, *program], cwd=folder, env=env)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "pkg" / "main.py").write_text(SHOW)
    return tmp_path


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("import os\nos.environ['OMP_NUM_THREADS'] = '1'\n", marks=pytest.mark.long),
        "import os\nfor name in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS'):\n    os.environ[name] = '1'\n",
    ],
)
def test_what_a_package_sets_holds_as_in_a_cold_start(package: Path, source: str) -> None:
    (package / "pkg" / "__init__.py").write_text(source)
    outcomes = [run(package, "-m", "pkg.main", start=start) for start in ("auto", "cold")]
    assert [outcome.stdout.split() for outcome in outcomes] == [["1", "1"]] * 2, outcomes[0].explain()
    assert "__init__.py sets OMP_NUM_THREADS" in " ".join(outcomes[0].stderr.split())


def test_a_change_that_comes_too_late_is_said_once(package: Path) -> None:
    (package / "pkg" / "__init__.py").write_text(HIDDEN)
    outcome = run(package, "-m", "pkg.main").check()
    line = "program sets OMP_NUM_THREADS,"
    assert outcome.stderr.count(line) == 1, outcome.explain()
    assert "--start cold" in outcome.stderr


@pytest.mark.parametrize(
    "imports",
    [
        pytest.param("import torch\n", marks=pytest.mark.long),
        pytest.param("from torch import nn\n", marks=pytest.mark.long),
        "def f():\n    import torch\n    exec(SOURCE)\nf()\n",
        "import helper\n",
    ],
)
def test_a_change_after_the_programs_own_import_is_as_in_a_cold_start(tmp_path: Path, imports: str) -> None:
    (tmp_path / "helper.py").write_text("import torch.nn as nn\n")
    body = "" if "SOURCE" in imports else HIDDEN
    (tmp_path / "main.py").write_text(f"SOURCE = {HIDDEN!r}\n{imports}{body}{SHOW}")
    outcome = run(tmp_path, "main.py")
    assert (outcome.exit_code, outcome.stdout.split()) == (0, SHOWN), outcome.explain()
    assert "which torch reads" not in outcome.stderr


def make_shadow(folder: Path) -> None:
    (folder / "libs").mkdir()
    (folder / "libs" / "typing_extensions.py").write_text("import sys\nsys.exit('shadowed')\n")


def test_a_folder_with_another_module_makes_workers_start_cold(tmp_path: Path) -> None:
    make_shadow(tmp_path)
    inserted = "import os, sys\nROOT = os.path.dirname(os.path.abspath(__file__))\n"
    inserted += "sys.path.insert(0, os.path.join(ROOT, 'libs'))\n"
    (tmp_path / "main.py").write_text(inserted + SHOW)
    outcome = run(tmp_path, "main.py").check(1)
    assert "inserts the folder" in " ".join(outcome.stderr.split())
    assert "shadowed" in outcome.stderr


def test_a_folder_that_the_source_does_not_show_is_said_at_the_end(tmp_path: Path) -> None:
    make_shadow(tmp_path)
    (tmp_path / "main.py").write_text("import sys\ngetattr(sys, 'path').insert(0, input and 'libs')\n" + SHOW)
    outcome = run(tmp_path, "main.py")
    assert (outcome.exit_code, outcome.stdout.split()) == (0, SHOWN), outcome.explain()
    assert outcome.stderr.count("folder of libs/typing_extensions") == 1


def test_other_folders_and_variables_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "libs").mkdir()
    (tmp_path / "libs" / "mine.py").write_text("x = 1\n")
    source = "import os, sys\nsys.path.insert(0, 'libs')\nimport mine\nos.environ['MINE'] = '1'\n"
    (tmp_path / "main.py").write_text(source + SHOW)
    outcome = run(tmp_path, "main.py")
    assert (outcome.exit_code, outcome.stdout.split()) == (0, SHOWN), outcome.explain()
    assert "muster: the program" not in outcome.stderr
