"""The hook that counts the steps of optimizers, on a torch of a few lines. The process test has torch itself.

Source of the fake: `Optimizer.profile_hook_step` in torch/optim/optimizer.py of torch 2.13.
"""

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from muster._shared.contract import Env
from muster._shared.layouts import StatusPageLayout as Layout
from muster.agent.workers import program
from muster.agent.workers.hooks import steps
from muster.agent.workers.status_page import StatusPage

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory files, which only Linux has")

TORCH = """
__version__ = "{version}"
from torch import optim, compiler
"""
COMPILER = """
compiling = False
def is_compiling():
    return compiling
"""
HOOKS = """
def register_optimizer_step_pre_hook(hook):
    before.append(hook)
def register_optimizer_step_post_hook(hook):
    after.append(hook)
"""
OPTIMIZER = """
import torch
before, after = [], []
def hooked(step):
    def wrapper(self, *args):
        for hook in before:
            assert hook(self, args, {{}}) is None
        step(self, *args)
        for hook in after:
            hook(self, args, {{}})
    return wrapper
class Optimizer:
    @hooked
    def step(self, error=None):
        if error is not None:
            raise error
class Derived(Optimizer):
    @hooked
    def step(self):
        super().step()
{hooks}
"""


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[StatusPage]:
    page = StatusPage(nproc=2, round_number=7, attempt=1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv(Env.STATUS_PAGE, page.build_env(1)[Env.STATUS_PAGE])
    monkeypatch.delenv(Env.WATCHED, raising=False)
    yield page
    page.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the fake torch is imported from, in place of the real one if that is imported."""
    real = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"}
    for name in real:
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    write_torch(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        del sys.modules[name]
    sys.modules.update(real)


def write_torch(folder: Path, *, version: str = "2.13.0+cpu", hooks: str = HOOKS) -> None:
    (folder / "torch" / "optim").mkdir(parents=True, exist_ok=True)
    (folder / "torch" / "__init__.py").write_text(TORCH.format(version=version))
    (folder / "torch" / "compiler.py").write_text(COMPILER)
    (folder / "torch" / "optim" / "__init__.py").write_text("from torch.optim import optimizer\n")
    (folder / "torch" / "optim" / "optimizer.py").write_text(OPTIMIZER.format(hooks=hooks))


def import_optimizer() -> Any:
    importlib.invalidate_caches()
    return importlib.import_module("torch.optim.optimizer")


@pytest.fixture
def optimizer(page: StatusPage, folder: Path) -> ModuleType:
    """The fake torch.optim.optimizer, hooked when it was imported."""
    program.hook_torch()
    module: ModuleType = import_optimizer()
    return module


def count(page: StatusPage) -> int | None:
    return page.read_slot(1).optimizer_steps


def test_the_layout_is_the_contracts() -> None:
    names = ("MAGIC_WORD", "SLOTS", "ROUND", "ATTEMPT", "STEP", "TOTAL", "CHANGED_NS", "OPTIMIZER_STEPS")
    names = (*names, "BLOCK_BYTES", "MAX_STEP")
    assert all(getattr(steps, f"_{name}") == getattr(Layout, name) for name in names)
    assert steps._PAGE_MAGIC == Layout.MAGIC
    assert (program._WATCHED, program._STATUS_PAGE) == (Env.WATCHED, Env.STATUS_PAGE)


def test_steps_are_counted_and_nothing_is_claimed(page: StatusPage, optimizer: Any) -> None:
    mine = optimizer.Optimizer()
    assert page.read_slot(1).changed_ns is None
    for _ in range(3):
        mine.step()
    status = page.read_slot(1)
    assert (status.optimizer_steps, status.step, status.owner_pid) == (3, None, None)
    assert status.changed_ns is not None
    assert count(page) == 3
    assert page.read_slot(0).optimizer_steps is None


def test_of_several_optimizers_the_busiest_counts(page: StatusPage, optimizer: Any) -> None:
    generator, critic = optimizer.Optimizer(), optimizer.Optimizer()
    for _ in range(3):
        generator.step()
        critic.step()
        critic.step()
    assert count(page) == 6


def test_a_new_optimizer_begins_at_none_even_with_the_id_of_an_old_one(page: StatusPage, optimizer: Any) -> None:
    """The count never falls, and the time of the last step tells that there is progress."""
    for _ in range(4):
        old = optimizer.Optimizer()
        for _ in range(5):
            old.step()
        before = page.read_slot(1).changed_ns
        del old
        gc.collect()
        assert count(page) == 5
    new = optimizer.Optimizer()
    new.step()
    assert count(page) == 5
    assert page.read_slot(1).changed_ns != before


def test_a_step_that_calls_its_base_classes_counts_once(page: StatusPage, optimizer: Any) -> None:
    mine = optimizer.Derived()
    mine.step()
    mine.step()
    assert count(page) == 2


def test_a_step_that_fails_does_not_count(page: StatusPage, optimizer: Any) -> None:
    mine = optimizer.Optimizer()
    with pytest.raises(ValueError, match="no gradient"):
        mine.step(ValueError("no gradient"))
    mine.step()
    assert count(page) == 1


def test_a_script_that_reports_steps_has_them_counted_by_nothing_else(page: StatusPage, optimizer: Any) -> None:
    mine = optimizer.Optimizer()
    mine.step()
    slot = steps._map_slot(os.environ[Env.STATUS_PAGE])
    slot[Layout.STEP] = 1 + 41
    changed_ns = slot[Layout.CHANGED_NS]
    for _ in range(9):
        mine.step()
    assert (count(page), page.read_slot(1).step, slot[Layout.CHANGED_NS]) == (1, 41, changed_ns)


FIT = """
class Loop:
    def __init__(self, trainer):
        self.trainer = trainer
    def advance(self, optimizer):
        optimizer.step()
        self.trainer.global_step += 1
class Part:
    def advance(self, loop, optimizer):
        loop.advance(optimizer)
"""


class Trainer:
    """What is read of one of Lightning."""

    def __init__(self, optimizers: int = 1, before: int = 0, total: float = 9) -> None:
        self.optimizers = [None] * optimizers
        self.global_step = before
        self.total = total

    @property
    def estimated_stepping_batches(self) -> float:
        if self.total < 0:
            raise ValueError("gradients are accumulated differently in each epoch")
        return self.total


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def fit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A loop of Lightning's, of which the frame nearest to the optimizer knows no Trainer."""
    monkeypatch.setitem(sys.modules, request.param, ModuleType(request.param))
    module = ModuleType(f"{request.param}.loops")
    exec(FIT, module.__dict__)
    return module


def do_steps(fit: Any, optimizer: Any, trainer: Trainer, count: int) -> None:
    for _ in range(count):
        fit.Part().advance(fit.Loop(trainer), optimizer)


def test_a_fit_of_lightning_has_its_step_and_total(page: StatusPage, optimizer: Any, fit: Any) -> None:
    do_steps(fit, optimizer.Optimizer(), Trainer(before=100, total=109), 3)
    status = page.read_slot(1)
    assert (status.step, status.total, status.optimizer_steps, status.owner_pid) == (103, 109, 3, None)
    do_steps(fit, optimizer.Optimizer(), Trainer(), 1)  # the next fit
    assert (page.read_slot(1).step, page.read_slot(1).total) == (1, 9)


@pytest.mark.parametrize("total", [float("inf"), -1, 0, 2**63])
def test_a_total_that_is_none_is_not_shown(page: StatusPage, optimizer: Any, fit: Any, total: float) -> None:
    do_steps(fit, optimizer.Optimizer(), Trainer(total=total), 2)
    status = page.read_slot(1)
    assert (status.step, status.total) == ((None, None) if total == -1 else (2, None))
    assert status.optimizer_steps == 2


def test_of_a_fit_with_several_optimizers_the_busiest_counts(page: StatusPage, optimizer: Any, fit: Any) -> None:
    trainer = Trainer(optimizers=2)
    for each in (optimizer.Optimizer(), optimizer.Optimizer()):
        do_steps(fit, each, trainer, 2)
    assert (page.read_slot(1).step, page.read_slot(1).total, count(page)) == (None, None, 2)


def test_a_callback_that_reports_steps_of_a_fit_has_the_word(page: StatusPage, optimizer: Any, fit: Any) -> None:
    mine, trainer = optimizer.Optimizer(), Trainer()
    do_steps(fit, mine, trainer, 1)
    slot = steps._map_slot(os.environ[Env.STATUS_PAGE])
    slot[Layout.STEP] = 1 + 41
    do_steps(fit, mine, trainer, 1)
    assert page.read_slot(1).step == 41


def test_an_optimizer_that_lightning_does_not_call_is_only_counted(page: StatusPage, optimizer: Any, fit: Any) -> None:
    optimizer.Optimizer().step()
    assert (page.read_slot(1).step, count(page)) == (None, 1)


def test_while_a_step_is_traced_nothing_is_counted(page: StatusPage, optimizer: Any) -> None:
    mine = optimizer.Optimizer()
    optimizer.torch.compiler.compiling = True
    mine.step()
    assert count(page) is None
    optimizer.torch.compiler.compiling = False
    mine.step()
    assert count(page) == 1


def test_a_torch_that_is_already_imported_is_hooked_at_once(page: StatusPage, folder: Path) -> None:
    module = import_optimizer()
    finders = sys.meta_path[:]
    program.hook_torch()
    assert sys.meta_path == finders
    module.Optimizer().step()
    assert count(page) == 1


def test_the_finder_is_gone_after_the_import_and_stays_without_it(page: StatusPage, folder: Path) -> None:
    finders = sys.meta_path[:]
    program.hook_torch()
    assert sys.meta_path[1:] == finders
    importlib.import_module("json")
    assert sys.meta_path[1:] == finders
    import_optimizer()
    assert sys.meta_path == finders


def test_a_program_that_has_removed_the_finder_imports_all_the_same(page: StatusPage, folder: Path) -> None:
    program.hook_torch()
    finder: Any = sys.meta_path.pop(0)
    assert finder.find_spec("torch.optim.optimizer") is None
    assert import_optimizer().before == []


@pytest.mark.parametrize(
    "torch", [{"hooks": ""}, {"version": "2.3.1"}, {"version": "unknown"}], ids=["no hooks", "old", "odd"]
)
def test_another_torch_is_left_alone(page: StatusPage, folder: Path, torch: dict[str, str]) -> None:
    write_torch(folder, **torch)
    program.hook_torch()
    module = import_optimizer()
    assert (module.before, module.after) == ([], [])
    module.Optimizer().step()
    assert count(page) is None


@pytest.mark.parametrize(
    "where", ["", "no page", "/proc/self/no/such:1:0", "{page}:8:1", "{page}:7:2", "/dev/null:7:1"]
)
def test_without_a_page_of_this_rank_steps_go_on(page, folder, monkeypatch, where, capfd) -> None:
    own = os.environ[Env.STATUS_PAGE].rpartition(":")[0].rpartition(":")[0]
    monkeypatch.setenv(Env.STATUS_PAGE, where.format(page=own))
    program.hook_torch()
    mine = import_optimizer().Optimizer()
    mine.step()
    mine.step()
    assert count(page) is None
    assert capfd.readouterr() == ("", "")


def test_without_muster_nothing_is_hooked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(Env.STATUS_PAGE, raising=False)
    monkeypatch.delenv(Env.WATCHED, raising=False)
    finders = sys.meta_path[:]
    program.hook_torch()
    assert sys.meta_path == finders
    assert import_optimizer().after == []
