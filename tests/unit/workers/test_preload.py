"""What a program imports is found without running it."""

import sys
from pathlib import Path

import pytest

from muster.agent.workers.warm.preload import choose_modules


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "installed")])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def choose(folder: Path, source: str, words: str = "auto") -> tuple[str, ...]:
    (folder / "main.py").write_text(source)
    return choose_modules(words, kind="script", target=str(folder / "main.py")).modules


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("import torch", ("torch",)),
        ("import torch as t, os", ("torch",)),
        ("import torch.distributed as dist", ("torch", "torch.distributed")),
        ("from torch.nn.parallel import DistributedDataParallel", ("torch", "torch.nn.parallel", "torch._dynamo")),
        ("import torch\nnet = torch.nn.parallel.DistributedDataParallel(x)", ("torch", "torch._dynamo")),
        ("import torch\nstep = torch.optim.Adam(x)", ("torch", "torch._dynamo")),
        ("from torch import nn, optim", ("torch", "torch._dynamo")),
        ("import torch\nnet = torch.compile(x)", ("torch", "torch._dynamo")),
        ("from torch.distributed.fsdp import fully_shard", ("torch", "torch.distributed.fsdp", "torch._dynamo")),
        ("import torch\nimport re\nre.compile('x')", ("torch",)),
        ("import optim", ()),
        ("def main():\n    import torch", ("torch",)),
        ("try:\n    import torch\nexcept ImportError:\n    pass", ("torch",)),
        ("import lightning", ("torch",)),
        ("import os, json", ()),
        ("import torchlike", ()),
        ("'import torch'", ()),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", ()),
        ("import typing\nif typing.TYPE_CHECKING:\n    import os\nelse:\n    import torch", ("torch",)),
        ("this is not python", ()),
        ("import os\nos.environ['MASTER_ADDR'] = 'x'\nimport torch", ("torch",)),
        ("import os\nos.environ['RANK']\nimport torch", ("torch",)),
    ],
)
def test_auto(folder: Path, source: str, modules: tuple[str, ...]) -> None:
    assert choose(folder, source) == modules


@pytest.mark.parametrize(("place", "modules"), [("installed", ("tabulate",)), (".", ())])
def test_what_the_compiler_imports_at_its_end_is_imported_where_it_is_installed(folder, place, modules) -> None:
    (folder / place / "tabulate").mkdir(parents=True)
    (folder / place / "tabulate" / "__init__.py").touch()
    assert choose(folder, "import torch\nnet = torch.compile(x)") == ("torch", "torch._dynamo", *modules)


@pytest.mark.parametrize(
    "line",
    [
        "os.environ['OMP_NUM_THREADS'] = '4'",
        "os.environ.setdefault('OMP_NUM_THREADS', '4')",
        "os.environ.update(OMP_NUM_THREADS='4')",
        "os.environ.update({'OMP_NUM_THREADS': '4'})",
        "os.putenv('OMP_NUM_THREADS', '4')",
        "environ['OMP_NUM_THREADS'] = '4'",
        "from os import environ as e\ne['OMP_NUM_THREADS'] = '4'",
        "env = os.environ\nenv['OMP_NUM_THREADS'] = '4'",
        "os.environ |= {'OMP_NUM_THREADS': '4'}",
        "os.environ |= dict(OMP_NUM_THREADS='4')",
        "for name in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS'):\n    os.environ[name] = '4'",
        "for name, value in {'OMP_NUM_THREADS': '4'}.items():\n    os.environ.setdefault(name, value)",
        "threads = {'OMP_NUM_THREADS': '4'}\nos.environ.update(threads)",
        "threads = {'OMP_NUM_THREADS': '4'}\nos.environ.update({**threads})",
    ],
)
def test_a_program_that_sets_what_torch_reads_gets_no_torch(folder: Path, line: str) -> None:
    (folder / "main.py").write_text(f"import os\nfrom os import environ\n{line}\nimport torch\n")
    chosen = choose_modules("auto", kind="script", target="main.py")
    assert chosen.modules == ()
    assert "main.py sets OMP_NUM_THREADS" in chosen.notice
    assert choose_modules("auto,torch", kind="script", target="main.py").modules == ("torch",)


def test_names_are_added_or_stand_alone(folder: Path) -> None:
    assert choose(folder, "import torch", "auto, numpy") == ("torch", "numpy")
    assert choose(folder, "import torch", "numpy,a.b") == ("numpy", "a.b")
    assert choose(folder, "import torch", "auto,torch") == ("torch",)


@pytest.mark.parametrize("name", ["torch.py", "torch/__init__.py"])
def test_a_torch_beside_the_program_is_another_one(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).touch()
    assert choose(folder, "import torch\nimport torch.nn") == ()


def test_modules_beside_the_program_are_followed(folder: Path) -> None:
    (folder / "trainer.py").write_text("import deeper\nimport main\n")
    (folder / "deeper").mkdir()
    (folder / "deeper" / "__init__.py").write_text("import torch.nn\n")
    assert choose(folder, "from trainer import train") == ("torch", "torch.nn")


def test_a_module_and_a_package_are_found_without_importing(folder: Path) -> None:
    (folder / "pack").mkdir()
    (folder / "pack" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (folder / "pack" / "run.py").write_text("import torch\n")
    (folder / "pack" / "__main__.py").write_text("import torch.nn\n")
    assert choose_modules("auto", kind="module", target="pack.run").modules == ("torch",)
    assert choose_modules("auto", kind="module", target="pack").modules == ("torch", "torch.nn")
    assert choose_modules("auto", kind="module", target="no_such").modules == ()
    assert choose_modules("auto", kind="script", target="no_such.py").modules == ()
    assert choose_modules("auto", kind="script", target="pack").modules == ("torch", "torch.nn")


@pytest.mark.parametrize(
    ("target", "source", "setter"),
    [
        ("pack.run", "", "pack/__init__.py"),
        ("pack.run", "", "pack/deep/__init__.py"),
        ("pack.run", "from . import settings", "pack/settings.py"),
        ("pack.run", "from .deep.settings import x", "pack/deep/settings.py"),
        ("pack.deep.run", "from .. import settings", "pack/settings.py"),
        ("pack.deep.run", "from pack import settings", "pack/settings.py"),
    ],
)
def test_what_packages_and_their_modules_set_is_found(folder: Path, target: str, source: str, setter: str) -> None:
    (folder / "pack" / "deep").mkdir(parents=True)
    for name in ("pack/__init__.py", "pack/deep/__init__.py"):
        (folder / name).touch()
    (folder / setter).write_text("import os\nos.environ['OMP_NUM_THREADS'] = '4'\n")
    extra = "import pack.deep\n" if setter == "pack/deep/__init__.py" else ""
    (folder / f"{target.replace('.', '/')}.py").write_text(f"{source}\n{extra}import torch\n")
    chosen = choose_modules("auto", kind="module", target=target)
    assert (chosen.modules, chosen.notice.partition(",")[0]) == (
        (),
        f"torch is not preloaded: {Path(setter).name} sets OMP_NUM_THREADS",
    )


def test_a_copy_of_the_environment_is_not_the_programs_own(folder: Path) -> None:
    """It is for a process that the program starts."""
    source = "import os, torch\nenv = os.environ.copy()\nenv['OMP_NUM_THREADS'] = '1'\n"
    assert choose(folder, source) == ("torch",)


def test_a_loop_over_other_variables_changes_nothing(folder: Path) -> None:
    source = "import os, torch\nfor name in ('MASTER_ADDR', 'RANK'):\n    os.environ[name] = '1'\nprint('Python')\n"
    assert choose(folder, source) == ("torch",)
