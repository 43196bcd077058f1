"""The examples in the docstrings of torch's launcher, agent and multiprocessing, with only the import changed."""

import os
import signal
import sys
import tempfile
import time

from muster.elastic import launcher

if __name__ == "__main__":  # workers need none of it: torch's own classes import torch, which takes them a second
    # as written: from torch.distributed.launcher.api import ...; from torch.distributed.elastic.agent.server ... import ...
    from muster.elastic import (
        ChildFailedError,
        DefaultLogsSpecs,
        LaunchConfig,
        LocalElasticAgent,
        RunProcsResult,
        RunResult,
        SignalException,
        Std,
        SubprocessContext,
        WorkerSpec,
        WorkerState,
        elastic_launch,
        start_processes,
    )

    if sys.argv[1] != "held":  # what waits on a hold has torch
        launcher._PRELOADED = ()



def worker_fn(foo):
    return foo, os.environ["RANK"]


def trainer(args) -> str:
    return "do train"


def fail(text):
    if os.environ["LOCAL_RANK"] == "1":
        raise ValueError(text)
    time.sleep(60)


def foo(bar):
    sys.stdout.write(f"foo {bar}\n")  # one write: the other rank writes at the same time
    sys.stdout.flush()
    return bar, os.environ.get("RANK"), os.environ.get("X")


def foo_when(path, bar):
    while not os.path.exists(path):
        time.sleep(0.01)
    return foo(bar)


def wait_for_signal():
    sys.stdout.write("waiting\n")  # as above
    sys.stdout.flush()
    time.sleep(600)


def make_config(**kwargs):
    return LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, **kwargs)


def scenario_launcher():
    outputs = elastic_launch(make_config(rdzv_backend="c10d", rdzv_endpoint="localhost:0"), worker_fn)("foo")
    print(outputs[0], outputs, flush=True)  # the commands below write for themselves
    print(elastic_launch(make_config(), "echo")("${local_rank}", 1.5))
    print(elastic_launch(make_config(), lambda x: x * 2)(3))
    config = make_config(max_restarts=0, log_dir=tempfile.mkdtemp(), redirects=Std.ALL)
    try:
        elastic_launch(config, fail)("the text")
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(rank, failure.exitcode, failure.message["message"], os.path.isfile(failure.error_file))
        print(repr(error.__cause__))
    try:
        elastic_launch(make_config(), worker_fn)(foo=1)
    except TypeError:
        print("keywords are a TypeError")
    try:
        elastic_launch(make_config(start_method="thread"), worker_fn)(1)
    except ValueError as error:
        print(error)
    try:
        elastic_launch(make_config(numa_options=None, event_log_handler="mine"), worker_fn)(1)
    except ValueError as error:
        print(error)


def scenario_agent():
    start_method = "spawn"
    spec = WorkerSpec(role="trainer", local_world_size=2, entrypoint=trainer, args=("foobar",))
    agent = LocalElasticAgent(spec, start_method)
    results = agent.run()
    if results.is_failed():
        print("trainer failed")
    else:
        print(f"rank 0 return value: {results.return_values[0]}")
    group = agent.get_worker_group()
    print(type(results) is RunResult, group.state is WorkerState.SUCCEEDED, [w.global_rank for w in group.workers])
    spec = WorkerSpec(role="trainer", local_world_size=2, entrypoint="echo", args=("--trainer-args", "foobar"))
    results = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=tempfile.mkdtemp(), redirects=Std.ALL)).run()
    if not results.is_failed():
        print("binary launches do not have return values", results.return_values)
    spec = WorkerSpec(role="trainer", local_world_size=2, entrypoint=fail, args=("boo",), max_restarts=1)
    results = LocalElasticAgent(spec, "spawn", 300, tempfile.mkdtemp(), None).run()
    print(results.is_failed(), {rank: failure.exitcode for rank, failure in results.failures.items()})
    try:

        class Agent(LocalElasticAgent):
            def _start_workers(self, worker_group):
                return {}

    except ValueError as error:
        print(error)


def scenario_processes():
    for number, older in enumerate((True, False)):
        log_dir = tempfile.mkdtemp()
        logs = {"log_dir": log_dir} if older else {"logs_specs": DefaultLogsSpecs(log_dir=log_dir, tee=Std.OUT)}
        args = {rank: (f"{log_dir}.go", f"bar{rank}") for rank in (0, 1)}
        context = start_processes(
            name="trainer", entrypoint=foo_when, args=args, envs={0: {}, 1: {"X": "1"}}, **logs
        )
        print(sorted(context.pids()), context.wait(0))
        open(f"{log_dir}.go", "w").close()
        result = context.wait()
        print(type(result) is RunProcsResult, result.return_values, sorted(result.stdouts))


def scenario_commands():
    folder = tempfile.mkdtemp()
    context = start_processes(
        name="trainer",
        entrypoint="/usr/bin/touch",
        args={0: (f"{folder}/file1",), 1: (f"{folder}/file2",)},
        envs={0: {}, 1: {}},
        log_dir=tempfile.mkdtemp(),
    )
    print(context.wait().return_values, sorted(os.listdir(folder)))
    files = [{rank: os.path.join(folder, f"{name}{rank}") for rank in (0, 1)} for name in ("out", "err", "error")]
    context = SubprocessContext("trainer", "echo", {0: (1, 2, 3), 1: ([1, 2, 3],)}, {0: {}, 1: {}}, *files[:2], {}, {}, files[2])
    context.start()
    result = context.wait()
    print([open(path).read() for path in result.stdouts.values()], result.stdouts == files[0])
    try:
        start_processes("trainer", foo, {0: ("a",), 1: ("b",)}, {0: {}}, DefaultLogsSpecs())
    except RuntimeError as error:
        print(error)


def scenario_ends():
    log_dir = tempfile.mkdtemp()
    envs = {rank: {"LOCAL_RANK": str(rank)} for rank in (0, 1)}
    context = start_processes("trainer", fail, {0: ("a",), 1: ("b",)}, envs, log_dir, "spawn", Std.OUT, {1: Std.ERR})
    print({rank: (f.exitcode, f.message["message"]) for rank, f in context.wait().failures.items()})
    print(sorted(os.listdir(os.path.join(log_dir, "1"))))
    try:
        start_processes("trainer", fail, {0: ("a",)}, {0: {}}, log_dir)
    except RuntimeError as error:
        print(str(error).replace(log_dir, "D"))
    context = start_processes("trainer", wait_for_signal, {0: ()}, {0: {}}, DefaultLogsSpecs(redirects=Std.ALL))
    print(context.wait(0.2))
    context.close()
    print("closed", {rank: failure.exitcode for rank, failure in context.wait().failures.items()})


def expire(after):
    import torch.distributed.elastic.timer as timer

    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with timer.expires(after=after):  # it would expire while rank 0 sleeps
        pass
    with timer.expires(after=after if attempt == 0 and os.environ["RANK"] == "1" else 600):
        if attempt == 0:
            time.sleep(600)
    return attempt


def scenario_timers():
    os.environ["TORCHELASTIC_ENABLE_FILE_TIMER"] = "1"
    print(elastic_launch(make_config(max_restarts=1), expire)(5))
    try:
        elastic_launch(make_config(max_restarts=0), expire)(5)
    except ChildFailedError as error:
        print(error.get_first_failure()[0], error.get_first_failure()[1].exitcode)
    print("TORCHELASTIC_TIMER_FILE" in os.environ)


class HealthCheck:
    def start(self):
        print("health check starts")

    def stop(self):
        print("health check stops")


def scenario_options():
    """What has no effect, or no counterpart, is said."""
    import warnings

    from torch.distributed.elastic.agent.server.api import WorkerSpec as TorchWorkerSpec  # a torch one will do

    spec = TorchWorkerSpec("trainer", 1, rdzv_handler=None, entrypoint=trainer, args=("a",))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        LocalElasticAgent(spec, DefaultLogsSpecs(), "spawn", 300)
        LocalElasticAgent(spec, "spawn", 20)
    print([(str(each.message), os.path.basename(each.filename)) for each in caught])
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(), health_check_server=HealthCheck(), uninterruptible_state_timeout=7)
    print(agent.run().return_values)
    try:
        LocalElasticAgent(spec, "spawn", 300, None, object())
    except ValueError as error:
        print(str(error).partition(" has ")[2])
    try:
        from muster.elastic import SimpleElasticAgent  # noqa: F401
    except ImportError as error:
        print(error)


def scenario_signal():
    try:
        elastic_launch(make_config(), wait_for_signal)()
    except SignalException as error:
        print("signal", error.sigval is signal.SIGTERM, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)


def scenario_held():
    print(elastic_launch(make_config(), worker_fn, held=True)("foo"), flush=True)
    try:
        elastic_launch(make_config(max_restarts=0), fail, held=True)("the text")
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(rank, failure.exitcode, repr(error.__cause__))


if __name__ == "__main__":
    for scenario in sys.argv[1].split(","):
        globals()[f"scenario_{scenario}"]()
