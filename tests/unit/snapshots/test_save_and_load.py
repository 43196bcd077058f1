"""`save` and `load` of one rank: tensors of every kind, slots, limits, and that no memory is shared."""

import ctypes
import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
import snapshot_memory
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshot_memory import Node, save_and_load, worker

from muster import snapshots
from muster._shared.contract import Env
from muster._shared.layouts import SnapshotBlock as Block
from muster._shared.layouts import SnapshotHeader as Header
from muster._shared.snapshot_file import COMPLETE, SLOT_SPACE, SLOTS, WRITING
from muster.snapshots import content, saving
from muster.snapshots.layout import Run, Vector

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:ComplexHalf")]

DTYPES = sorted(
    (
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype)
        and not str(value).startswith(("torch.q", "torch.bits", "torch.int1", "torch.uint1", "torch.int2"))
    ),
    key=str,
)


PRINTED = [
    dtype for dtype in DTYPES if not str(dtype).endswith(("int2", "int3", "int4", "int5", "int6", "int7", "_x2"))
]
"""Without those that torch can neither print nor copy, which hypothesis would have to."""


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.close()


def list_bytes(tensor: torch.Tensor) -> list[int]:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = flat.as_strided((flat.numel(),), (1,))
    return flat.view(torch.uint8).tolist() if flat.numel() else []


def assert_same(found: Any, wanted: Any) -> None:
    """Bit by bit."""
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert list_bytes(found) == list_bytes(wanted)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == wanted


def make_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    return torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    made = make_tensor(draw(st.sampled_from(PRINTED)), shape, draw(st.integers(0, 99)))
    way = draw(st.sampled_from(["as it is", "transposed", "slice", "expanded"]))
    if way == "transposed" and made.dim():
        return made.permute(*reversed(range(made.dim())))
    if way == "slice" and made.dim():
        return made[..., ::2]
    if way == "expanded":
        return made.unsqueeze(0).expand(2, *shape)
    return made


STATES = st.recursive(
    tensors() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=8,
)


@given(STATES)
@settings(max_examples=30, deadline=None)
def test_what_is_loaded_is_equal_bit_by_bit_and_shares_no_memory(state: Any) -> None:
    node = Node()
    try:
        with worker(node):
            snapshots.save(3, state)
        node.begin_round(2, (1, 3))
        with worker(node):
            snapshot = snapshots.load()
        assert_same(snapshot.state, state)
        for fd in node.content_fds:  # whatever happens to the slots, the loaded state stays what it is
            for slot in range(SLOTS):
                os.pwrite(fd, b"\x55" * (1 << 19), slot * SLOT_SPACE)
        assert_same(snapshot.state, state)
    finally:
        node.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    state = {
        "x": make_tensor(dtype, (3, 4), 1),
        "one": make_tensor(dtype, (), 2),
        "none": make_tensor(dtype, (0, 2), 3),
    }
    assert_same(save_and_load(state), state)
    into = {name: torch.empty_like(value) for name, value in state.items()}
    loaded = save_and_load(state, into)
    assert_same(into, state)
    assert all(loaded[name] is into[name] for name in state)


def test_tied_tensors_and_views_of_one_memory_are_that_again() -> None:
    base = torch.arange(100.0)
    weight = torch.ones(3, 4)
    state = {
        "head": weight,
        "tied": weight.detach(),
        "front": base[:50],
        "middle": base[20:80],
        "bytes": base.view(torch.uint8)[81:99],
        "apart": base[90:],
    }
    back = save_and_load(state)
    assert_same(back, state)
    back["tied"][0, 0] = 7
    back["middle"][0] = -1
    assert back["head"][0, 0] == 7
    assert back["front"][20] == -1
    assert back["apart"].untyped_storage().data_ptr() != back["front"].untyped_storage().data_ptr()


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*quantiz")
def test_other_layouts_of_torch_are_kept_as_torch_writes_them() -> None:
    state = {
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "meta": torch.empty(3, device="meta"),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
    }
    back = save_and_load(state)
    assert torch.equal(back["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(back["csr"].to_dense(), torch.eye(3))
    assert torch.equal(back["quantized"].int_repr(), state["quantized"].int_repr())
    assert back["meta"].is_meta
    assert type(back["parameter"]) is torch.nn.Parameter
    assert back["conjugate"].item() == 1 - 2j
    assert back["negative"].item() == -2


def test_a_model_an_optimizer_and_a_scheduler_go_on_exactly() -> None:
    def make() -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5))
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def train(parts: tuple[Any, Any, Any], steps: int) -> None:
        model, optimizer, scheduler = parts
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).sum().backward()
            optimizer.step()
            scheduler.step()

    parts = make()
    train(parts, 3)
    state = {"parts": [part.state_dict() for part in parts], "rng": torch.get_rng_state()}
    back = save_and_load(state)
    train(parts, 3)
    again = make()
    for part, one in zip(again, back["parts"], strict=True):
        part.load_state_dict(one)
    torch.set_rng_state(back["rng"])
    train(again, 3)
    assert_same(again[0].state_dict(), parts[0].state_dict())
    assert_same(again[1].state_dict(), parts[1].state_dict())


def test_into_fills_what_it_has_and_makes_the_rest() -> None:
    state = {"model": {"w": torch.ones(3)}, "optimizer": {"state": {0: {"m": torch.full((2,), 5.0)}}, "lr": 0.1}}
    into = {"model": {"w": torch.zeros(3)}, "optimizer": {"state": {}, "lr": 0.5}}
    back = save_and_load(state, into)
    assert back["model"]["w"] is into["model"]["w"]
    assert_same(back, state)


def make_small(count: int) -> dict[str, Any]:
    """Several runs of small tensors, of three types, and what cannot be copied with them."""
    turned = torch.arange(6.0).view(2, 3).t()
    parts = {f"{n}.weight\n" if n == 7 else f"{n}.weight": torch.full((n % 5 + 1,), float(n)) for n in range(count)}
    more = {"step": torch.tensor(7), "mask": torch.tensor([True, False]), "turned": turned, "none": torch.empty(0, 3)}
    odd = {"imag": torch.tensor([1 + 2j]).conj().imag, "conjugate": torch.tensor([1 + 2j, 3j]).conj()}
    return {**parts, **more, **odd}


@pytest.mark.parametrize("way", ["the same", "another order", "not contiguous", "some", "parameters", "negative"])
def test_many_small_tensors_are_loaded_bit_by_bit_whatever_they_are_copied_to(way: str) -> None:
    state = make_small(3000)
    into: dict[str, Any] = {name: torch.zeros(one.shape, dtype=one.dtype) for name, one in state.items()}
    if way == "another order":
        into = dict(reversed(into.items()))
    elif way == "not contiguous":
        into["4.weight"] = torch.zeros(10)[::2]
        into["2000.weight"] = torch.zeros(1).expand(1)
    elif way == "some":
        into = {name: one for name, one in into.items() if name not in ("1.weight", "step", "imag")}
    elif way == "parameters":
        into = {n: torch.nn.Parameter(one) if one.is_floating_point() else one for n, one in into.items()}
    elif way == "negative":
        into["0.weight"] = torch.tensor([1 + 2j], dtype=torch.complex64).conj().imag
    back = save_and_load({"nested": [state]}, {"nested": [into]})["nested"][0]
    assert list(back) == list(state)
    for name, one in state.items():
        assert_same(back[name].detach(), one)
        assert name not in into or back[name] is into[name]


def test_small_tensors_are_not_looked_at_one_by_one(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 of them are written and read in ten calls of the system: no view of a slot is made for any."""
    calls: list[str] = []
    transfer, view = content.transfer, content.Typed.view
    monkeypatch.setattr(content, "transfer", lambda *args: (calls.append(args[0]), transfer(*args)))
    monkeypatch.setattr(content.Typed, "view", lambda *args: (calls.append("view"), view(*args))[1])
    state = {f"layer.{n}": torch.full((8,), float(n)) for n in range(10_000)}
    with worker(node):
        for step in range(4):
            snapshots.save(step, state)
            snapshots._process.saver.wait()  # type: ignore[union-attr]
    node.begin_round(2, (1, 3))
    into = {name: torch.zeros(8) for name in state}
    with worker(node):
        assert snapshots.load(into=into) is not None
        assert_same(snapshots.load().state, state)  # type: ignore[union-attr]
    assert_same(into, state)
    assert calls == ["pwritev"] * 40 + ["preadv"] * 20


def test_a_copy_that_the_system_cuts_short_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = content.find_call

    def cut(name: str) -> Any:
        def call(fd: int, address: int, count: int, at: int) -> int:
            pieces = (ctypes.c_ulong * (2 * count)).from_buffer_copy(ctypes.string_at(address, 16 * count))
            pieces[2 * count - 1] = max(1, pieces[2 * count - 1] // 2)  # half of the last one, and then of one before
            return int(found(name)(fd, ctypes.addressof(pieces), max(1, count // 2), at))

        return call

    monkeypatch.setattr(content, "find_call", cut)
    state = {str(n): torch.arange(float(n)) for n in range(1, 30)}
    assert_same(save_and_load(state), state)
    monkeypatch.setattr(content, "find_call", lambda _: lambda *_: 0)
    with pytest.raises(OSError, match="is too short"):
        content.transfer("preadv", 0, 0, Vector(Run([0], 0, bytes([1] + [0] * 7)), [1], None))


@pytest.mark.parametrize(
    ("into", "words"),
    [
        ({"w": torch.zeros(4)}, r"state\['w'\] is torch.float32 of \(3,\) in the snapshot, torch.float32 of \(4,\)"),
        ({"w": torch.zeros(3, dtype=torch.float64)}, "torch.float64"),
        ({"w": torch.zeros(3), "v": torch.zeros(1)}, r"has a tensor state\['v'\], and the snapshot has none"),
    ],
)
def test_into_of_another_shape_is_refused(into: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        save_and_load({"w": torch.ones(3)}, into)


@pytest.mark.parametrize("wrong", [torch.zeros(2, 3), torch.zeros(6), torch.zeros(3, 2, dtype=torch.int32)])
def test_one_of_many_that_is_another_is_refused_before_anything_is_copied(wrong: torch.Tensor) -> None:
    state = {str(n): torch.ones(3, 2) for n in range(700)}
    into = {name: torch.zeros(3, 2) for name in state}
    into["600"] = wrong
    with pytest.raises(ValueError, match=r"state\['600'\] is torch.float32 of \(3, 2\)"):
        save_and_load(state, into)
    assert not any(one.any() for one in into.values())


def test_outside_muster_nothing_happens() -> None:
    with snapshot_memory.process({}):
        snapshots.save(1, {"f": lambda: 1})
        assert snapshots.load() is None
        assert snapshots.reader() is None


def test_memory_that_cannot_be_opened_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with snapshot_memory.process({Env.SNAPSHOTS: "/proc/1/fd/99999:1:0", "RANK": "0", "WORLD_SIZE": "1"}):
        snapshots.save(1, {})
        snapshots.save(2, {})
        assert snapshots.load() is None
    (line,) = capsys.readouterr().err.splitlines()
    assert "nothing is kept" in line


def test_steps_rise(node: Node) -> None:
    with worker(node):
        with pytest.raises(ValueError, match="0 or more, not -1"):
            snapshots.save(-1, {})
        snapshots.save(3, {})
        for step in (3, 2):
            with pytest.raises(ValueError, match=f"last step, not {step}"):
                snapshots.save(step, {})
        with pytest.raises(TypeError, match="int, not float"):
            snapshots.save(1.5, {})  # type: ignore[arg-type]
    node.begin_round(2, (1, 3))
    with worker(node):
        assert snapshots.load() is not None
        with pytest.raises(ValueError, match="above 3"):
            snapshots.save(3, {})


def test_the_confirmed_generation_and_a_pinned_slot_are_never_written(node: Node) -> None:
    control = node.control
    with worker(node):
        snapshots.save(0, {"x": torch.zeros(1)})
        node.confirm(0)
        for step in range(1, 6):
            snapshots.save(step, {"x": torch.full((1,), float(step))})
            assert control.find_slot(0, (1, 0)) is not None
        control.write_block(0, Block.PIN, 1 + control.find_slot(0, (1, 5)))
        for step in range(6, 9):
            snapshots.save(step, {"x": torch.full((1,), float(step))})
        assert {slot.step for slot in control.read_slots(0)} == {0, 5, 8}
        node.words[Header.HOLD] = 1 + 8
        snapshots.save(9, {})
        assert {slot.step for slot in control.read_slots(0)} == {0, 5, 8}
        assert control.read_block(0, Block.SKIPPED) == 1
    node.begin_round(2, (1, 5))
    with worker(node):
        assert snapshots.load().state["x"].item() == 5  # type: ignore[union-attr]


def test_a_worker_that_dies_while_it_saves_leaves_the_older_ones(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    with worker(node):
        snapshots.save(0, {"x": torch.zeros(4)})
        snapshots.save(1, {"x": torch.ones(4)})
        monkeypatch.setattr(content.Area, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            snapshots.save(2, {"x": torch.full((4,), 2.0)})
    assert sorted(slot.state for slot in node.control.read_slots(0)) == [WRITING, COMPLETE, COMPLETE]
    node.begin_round(2, (1, 1))
    with worker(node):
        assert snapshots.load().state["x"].tolist() == [1.0] * 4  # type: ignore[union-attr]


def test_a_state_may_change_its_shape_and_its_sharing(node: Node) -> None:
    shared = torch.arange(8.0)
    states: list[Any] = [
        {"a": torch.ones(3)},
        {"a": torch.ones(2_000_000), "b": [torch.zeros(2, 3)]},
        {"a": torch.ones(2, dtype=torch.int8)},
        {"a": shared, "b": shared},
        {"a": shared[:4], "b": shared[2:]},
        {"a": torch.ones(8), "b": shared.clone()},
        {},
        {"text": "x" * 3_000_000},
    ]
    for step, state in enumerate(states):
        with worker(node):
            if step:
                assert_same(snapshots.load().state, states[step - 1])  # type: ignore[union-attr]
            snapshots.save(step, state)
        node.begin_round(step + 2, (step + 1, step))
    with worker(node):
        for step, state in enumerate(states * 3, 100):
            snapshots.save(step, state)
            snapshots._process.saver.wait()  # type: ignore[union-attr]
            slot = node.control.find_slot(0, (len(states) + 1, step))
            saved = node.control.read_slots(0)[slot]  # type: ignore[index]
            one = content.open_near(node.content_fds[0], slot, saved.bytes)  # type: ignore[arg-type]
            from muster.snapshots.loading import fill

            assert_same(fill(one, one, None), state)


def test_a_plan_holds_while_tensors_are_of_the_same_kind_and_share_the_same_wherever_they_are(node: Node) -> None:
    """A model is asked for its state at each save: its tensors are new objects, and RNG states lie elsewhere."""

    def make(value: float, *, is_tied: bool = True, is_conjugate: bool = False) -> dict[str, Any]:
        weight = torch.full((700,), value)
        turned = torch.tensor([1j * value] * 3)
        parts = {"weight": weight, "tied": weight.detach() if is_tied else weight + 1, "front": turned[:2]}
        small = {"step": torch.tensor(value), "count": torch.tensor([int(value)]), "all": turned}
        return {**parts, **small, "all": turned.conj() if is_conjugate else turned, "rng": torch.get_rng_state()}

    states = [make(1), make(2), make(3), make(4, is_tied=False), make(5, is_tied=False, is_conjugate=True), make(6)]
    plans = []
    with worker(node):
        for step, state in enumerate(states):
            snapshots.save(step, state)
            saver: Any = snapshots._process.saver
            saver.wait()
            plans.append(saver._plan)
    assert [plan is before for before, plan in itertools.pairwise(plans)] == [True, True, False, False, False]
    for step in (3, 4, 5):
        node.begin_round(2, (1, step))
        with worker(node):
            assert_same(snapshots.load().state, states[step])  # type: ignore[union-attr]


def test_a_state_that_does_not_fit_is_one_line_and_the_job_goes_on(node, capsys) -> None:
    node.words[Header.LIMIT] = 30_000_000
    node.words[Header.COPIES] = 1
    with worker(node):
        for step in range(3):
            snapshots.save(step, {"x": torch.ones(2_000_000)})
        assert node.control.read_block(0, Block.REFUSED) > 8_000_000
        snapshots.save(3, {"x": torch.ones(1_000_000)})
    (line,) = capsys.readouterr().err.splitlines()
    assert "a state of 8.4" in line or "a state of 8." in line
    assert "5 states" in line
    assert "30 MB may be" in line
    assert [slot.step for slot in node.control.read_slots(0) if slot.state == COMPLETE] == [3]


def test_memory_that_the_node_has_not_is_one_line(node, capsys, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(content.os, "posix_fallocate", fail)
    with worker(node):
        snapshots.save(0, {})
        snapshots.save(1, {})
    (line,) = capsys.readouterr().err.splitlines()
    assert "(No space" in line


@pytest.mark.parametrize("where", ["data", "plain values"])
def test_what_is_damaged_is_refused_and_given_up(node: Node, where: str) -> None:
    with worker(node):
        snapshots.save(0, {"x": torch.ones(1000), "y": "text"})
    slot = node.control.read_slots(0)[0]
    at = 8192 + 400 if where == "data" else slot.bytes - 10
    before = os.pread(node.content_fds[0], 1, at)
    os.pwrite(node.content_fds[0], bytes([before[0] ^ 1]), at)
    node.begin_round(2, (1, 0))
    with worker(node), pytest.raises(RuntimeError, match="step 0 is damaged"):
        snapshots.load()
    assert node.control.find_slot(0, (1, 0)) is None


def test_the_newer_of_snapshot_and_checkpoint_is_continued(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    with worker(node):
        snapshots.save(7, {"x": 1})
    node.begin_round(2, (1, 7))
    with worker(node, MUSTER_RESUME_PATH="/ckpt/9", MUSTER_RESUME_STEP="9"):
        assert snapshots.load() is None
    with worker(node, MUSTER_RESUME_PATH="/ckpt/5", MUSTER_RESUME_STEP="5"):
        assert snapshots.load() == (7, {"x": 1})
    assert node.control.read_block(0, Block.LOADED) == 8
    first, second = capsys.readouterr().err.splitlines()
    assert "9 of /ckpt/9: the snapshot" in first
    assert "step 7, from memory" in second


def test_a_fork_of_a_worker_has_no_snapshots(node: Node) -> None:
    with worker(node):
        snapshots.save(0, {})
        read, write = os.pipe()
        child = os.fork()
        if not child:
            snapshots.save(1, {"f": lambda: 1})
            os.write(write, b"none" if snapshots.load() is None else b"some")
            os._exit(0)
        os.close(write)
        os.waitpid(child, 0)
        with open(read) as answer:
            assert answer.read() == "none"
        assert [slot.step for slot in node.control.read_slots(0) if slot.state == COMPLETE] == [0]


def test_copies_from_devices_are_complete_before_the_next_call(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the stream: the order of waiting, summing and marking, not CUDA."""
    import threading

    arrived = threading.Event()

    class Copies:
        def start(self, targets: list[Any], sources: list[Any]) -> Any:
            frozen = [source.clone() for source in sources]  # later work of the stream comes after the copy

            def wait() -> bool:
                assert arrived.wait(60)
                torch._foreach_copy_(targets, frozen)
                return frozen[0][0].item() != 7

            return wait

    monkeypatch.setattr(saving, "DeviceCopies", Copies)
    made = saving.Plan.__init__

    def make(self: Any, *args: Any, **more: Any) -> None:
        made(self, *args, **more)
        self.on_devices = True

    monkeypatch.setattr(saving.Plan, "__init__", make)
    x = torch.ones(1000)
    with worker(node):
        snapshots.save(0, {"x": x})
        x.fill_(9)  # the script goes on
        assert [slot.state for slot in node.control.read_slots(0)].count(COMPLETE) == 0
        arrived.set()
        snapshots.save(1, {"x": x})
        assert node.control.find_slot(0, (1, 0)) is not None
        x.fill_(7)  # a copy that is not whole
        snapshots.save(2, {"x": x})
        x.fill_(8)
        snapshots.save(3, {"x": x})
    assert {slot.step for slot in node.control.read_slots(0) if slot.state == COMPLETE} == {0, 1, 3}
    node.begin_round(2, (1, 0))
    with worker(node):
        assert snapshots.load().state["x"].tolist() == [1.0] * 1000  # type: ignore[union-attr]


@pytest.mark.long
def test_one_tensor_of_three_gigabytes(node: Node) -> None:
    x = torch.zeros(3 * (1 << 30) + 5, dtype=torch.uint8)
    x[::1_000_003] = 7
    with worker(node):
        snapshots.save(0, {"x": x})
    node.begin_round(2, (1, 0))
    with worker(node):
        into = {"x": torch.zeros_like(x)}
        assert snapshots.load(into=into) is not None
    assert torch.equal(into["x"], x)


def test_a_rank_without_memory_does_not_begin_elsewhere_than_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_process", snapshots._Process())
    monkeypatch.delenv("MUSTER_SNAPSHOTS", raising=False)
    assert snapshots.load() is None
    monkeypatch.setenv("MUSTER_SNAPSHOT_STEP", "7")
    with pytest.raises(RuntimeError, match=r"7 from memory, .* cannot"):
        snapshots.load()
