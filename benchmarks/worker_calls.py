"""What a script pays for `muster.worker`, and the agent for reading it.

`step(i, total=, loss=)` and `should_stop(i)` beside an empty function called in the same way, all in one process; one
slot read by the agent, times 1,024, as a share of a core at one look a second. Where torch is installed: a step of an
optimizer that does nothing, with the hook that counts it and with an empty one.

    python benchmarks/worker_calls.py [--count N]
"""

import os
import timeit

from _sampling import median, parse_count, sample_in_turn, show

from muster import worker
from muster.agent.workers import program
from muster.agent.workers.status_page import StatusPage

CALLS = 20_000
SLOTS = 1_024


def empty(i: int, *, total: int | None = None, **numbers: float) -> None:
    """Do nothing, to measure what any call costs."""


def main(count: int) -> None:
    """Print microseconds a call: median and spread."""
    page = StatusPage(nproc=SLOTS, round_number=1, attempt=0)
    os.environ.pop("TORCHELASTIC_RESTART_COUNT", None)
    os.environ.update(page.build_env(0))
    worker.step(0, total=10, loss=0.5)
    statements = {
        "step(i, total=, loss=)": ("step(7, total=10, loss=0.5)", "empty(7, total=10, loss=0.5)"),
        "should_stop(i)": ("should_stop(7)", "empty(7)"),
    }
    names = {"step": worker.step, "should_stop": worker.should_stop, "empty": empty}

    def time_us(statement: str) -> float:
        return timeit.timeit(statement, globals=names, number=CALLS) / CALLS * 1e6

    for figure, (ours, theirs) in statements.items():
        sampled = sample_in_turn(count, {"muster": lambda s=ours: time_us(s), "empty": lambda s=theirs: time_us(s)})
        show(figure, sampled, unit="us")
    look = sample_in_turn(count, {"muster": lambda: timeit.timeit(lambda: read_all(page), number=1) * 1e3})
    show(f"{SLOTS} slots", look, unit="ms")
    print(f"    share of a core at one look a second: {median(look['muster']) / 10:.2f} %", flush=True)
    compare_hooks(count, page)
    page.close()


def compare_hooks(count: int, page: StatusPage) -> None:
    """Print what a step of an optimizer costs with the hook that counts it, and with an empty one in its place."""
    try:
        import torch
        from torch.optim import optimizer as hooked
    except ImportError:
        return

    class Empty(torch.optim.Optimizer):
        def step(self) -> None:  # type: ignore[override]
            pass

    os.environ.update(page.build_env(1))  # a rank that reports no steps
    mine = Empty([torch.zeros(1)], {})
    before, after = hooked._global_optimizer_pre_hooks, hooked._global_optimizer_post_hooks  # noqa: SLF001
    program.hook_torch()
    counting = dict(before), dict(after)

    def time_us(*hooks: dict[int, object]) -> float:
        for registered, wanted in zip((before, after), hooks, strict=True):
            registered.clear()
            registered.update(wanted)  # type: ignore[arg-type]
        return timeit.timeit(mine.step, number=CALLS // 10) / CALLS * 10 * 1e6

    empty_hook = {1: lambda _optimizer, _args, _kwargs: None}
    samples = {"muster": lambda: time_us(*counting), "empty": lambda: time_us({}, empty_hook)}
    show("optimizer.step()", sample_in_turn(count, samples), unit="us")
    assert page.read_slot(1).optimizer_steps


def read_all(page: StatusPage) -> None:
    """Look once at every slot."""
    for local_rank in range(SLOTS):
        page.read_slot(local_rank)


if __name__ == "__main__":
    main(parse_count(__doc__))
