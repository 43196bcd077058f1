"""With `--preflight full`, measures an all-reduce within each node and over all nodes before the program starts.

It runs in a fork of the worker, so that the program finds a process without group, context or thread. The groups meet
in the round's store under their own names. If global rank 0's worker would host the store, its fork hosts it at the
same port. The other ranks wait until that store is gone, because their programs connect to the port next.

`workers.program` runs this file by its path, see `Env.RUN_FIRST`. Torch's objects are `Any`, because this file must not
import torch for their types. The advice is that of `_shared.preflight`, which is not imported here.
"""

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MIB = 1 << 20
_SIZES_CPU, _SIZES_DEVICE = (_MIB, 8 * _MIB, 32 * _MIB), (8 * _MIB, 64 * _MIB, 256 * _MIB)
"""Sizes in bytes per rank; the rate of the largest size counts."""
_REPEATS = 3
_LIMIT_S = 120
_SLOW = 0.5
"""Fraction of the median below which a node is named as slow."""
_SHOWN = 8
_ADVICE = "look at the node's links (`nvidia-smi topo -m`, `nvidia-smi nvlink -s`, `ibstat`)"


def run() -> None:
    """Measure with all ranks of the round; global rank 0 prints what was found.

    Raises:
        SystemExit: with a line that says why no all-reduce was possible.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        code = 1
        try:
            _measure_all()
            code = 0
        except BaseException as error:  # noqa: BLE001  # its text is the finding
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            os.write(write, line.encode("utf-8", "replace")[:2048])
        finally:
            os._exit(code)
    os.close(write)
    with open(read, "rb") as file:
        text = file.read().decode("utf-8", "replace")
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code:
        how = text or f"its process ended with {code}"
        raise SystemExit(f"preflight: no all-reduce could be done: {how} (--preflight quick leaves it out)")


def _measure_all() -> None:
    import datetime as dt

    import torch
    from torch import distributed

    rank, world, local_rank, local_world, node, nodes = (
        int(os.environ[name])
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    )
    has_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = distributed.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world,
        is_master=rank == 0 and not has_agent_store,
        timeout=dt.timedelta(seconds=_LIMIT_S),
        wait_for_workers=False,
    )
    mine = distributed.PrefixStore(f"muster_preflight/{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    has_device = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if has_device else torch.device("cpu")
    if has_device:
        torch.cuda.set_device(device)

    def run(name: str, index: int, size: int) -> float:
        """Return the rate of an all-reduce of these ranks in bytes per second; 0 if there is no other rank."""
        if size < 2:  # no partner
            return 0.0
        distributed.init_process_group(
            "nccl" if has_device else "gloo",
            store=distributed.PrefixStore(name, mine),
            rank=index,
            world_size=size,
            timeout=dt.timedelta(seconds=_LIMIT_S),
        )
        try:
            return _time_all_reduce(torch, device, size)
        finally:
            distributed.destroy_process_group()

    inner = run(f"node{node}", rank % local_world if nodes > 1 else rank, local_world) if nodes > 1 else 0.0
    outer = _measure_pairs(run, node, nodes) if nodes > 2 and rank % local_world == 0 else 0.0
    over_all = run("all", rank, world)
    if rank % local_world == 0:
        host = os.environ.get("MUSTER_NODE_NAME") or os.uname().nodename
        mine.set(f"result{node}", f"{host} {inner} {outer}")
    if rank == 0:
        results = [mine.get(f"result{each}").decode().split(" ") for each in range(nodes)]
        _print("nccl" if has_device else "gloo", world, over_all, results)
    if not has_agent_store:
        _leave_together(mine, rank, world, dt.timedelta(seconds=_LIMIT_S))


def _time_all_reduce(torch: "Any", device: "Any", size: int) -> float:
    rate = 0.0
    for size_bytes in _SIZES_DEVICE if device.type == "cuda" else _SIZES_CPU:
        tensor = torch.ones(size_bytes // 4, device=device)
        times_s = []
        for _ in range(_REPEATS + 1):  # +1 to connect
            begun_s = time.monotonic()
            torch.distributed.all_reduce(tensor)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times_s.append(time.monotonic() - begun_s)
        # Bytes per rank, as NCCL's tests count ("bus bandwidth").
        rate = size_bytes * 2 * (size - 1) / size / max(min(times_s[1:]), 1e-9)
    return rate


def _measure_pairs(run: "Any", node: int, nodes: int) -> float:
    """Measure one rank per node with both neighbours, and keep the better rate: a slow neighbour slows both."""
    rates = []
    for shift in (0, 1):
        index = (node - shift) % nodes
        is_single = index == nodes - 1 and nodes % 2 == 1  # odd, without a neighbour
        rates.append(0.0 if is_single else run(f"pair{shift}-{index // 2}", index % 2, 2))
    return max(rates)


def _print(backend: str, world: int, over_all: float, results: "list[list[str]]") -> None:
    lines = []
    if over_all:
        lines.append(f"all-reduce over {backend}, {world} ranks: {_format(over_all)}")
    for index, what in ((1, "within the nodes"), (2, "between neighbouring nodes")):
        rates = [float(result[index]) for result in results]
        known = sorted(rate for rate in rates if rate)
        if not known:
            continue
        median = known[len(known) // 2]
        if len(rates) <= _SHOWN:
            shown = ", ".join(f"node {node} {_format(rate)}" for node, rate in enumerate(rates) if rate)
        else:
            shown = f"{_format(known[0])} to {_format(known[-1])}, median {_format(median)}"
        lines.append(f"all-reduce {what}: {shown}")
        lines += [
            f"node {node} ({results[node][0]}): {_format(rate)} {what}, expected about {_format(median)}: {_ADVICE}"
            for node, rate in enumerate(rates)
            if 0.0 < rate < median * _SLOW
        ]
    sys.stderr.write("".join(f"muster: preflight: {line}\n" for line in lines))
    sys.stderr.flush()


def _format(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"


def _leave_together(store: "Any", rank: int, world: int, limit: "Any") -> None:
    """Let global rank 0, which hosts the store, leave last; the others wait until it is gone."""
    if rank == 0:
        store.wait([f"done{each}" for each in range(1, world)], limit) if world > 1 else None
        return
    store.set(f"done{rank}", "1")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides torch's warning about what is awaited
    try:
        store.wait(["never"], limit)
    except Exception:  # noqa: BLE001  # the connection is closed: that is what was waited for
        return
