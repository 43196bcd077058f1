"""The class of a failure, from what real programs, NCCL and kernels have written; and what follows, and the report.

Each row is one program or fault of a node: what its agent learns of it, the class, what follows when it happens for the
first time (h: restart here, e: elsewhere if a spare waits) and when it happens again in the same way within seconds of
the start (s: stop), and what the report's line about the cause begins with.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from doubles.samples import make_failure

from muster._shared.records import replace
from muster._shared.reports import Failure, OomEvidence, Report
from muster._shared.verdicts.causes import CLASSES, name_class
from muster.agent.diagnosis.classes import classify
from muster.agent.diagnosis.kernel_log import KernelLine, KernelLog, find_kernel_lines, parse_kernel_text
from muster.agent.diagnosis.report_text import format_report
from muster.agent.rendezvous.verdicts.deciding import VerdictRules, decide_verdict
from muster.agent.rendezvous.verdicts.restarts import Restarts

SURE = OomEvidence(certain=True, limit_bytes=1 << 30, source="/sys/fs/cgroup/memory.events")
GUESS = OomEvidence(certain=False, source="/proc/vmstat")
CUDA_ADVICE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions."
)
XID = "NVRM: Xid (PCI:0000:3b:00): {}, pid='<unknown>', name=<unknown>, {}"
HANDLING = (
    'Traceback (most recent call last):\n  File "train.py", line 3, in read\nEOFError: Ran out of input\n\n'
    "During handling of the above exception, another exception occurred:\n\n"
    'Traceback (most recent call last):\n  File "train.py", line 9, in close\nRuntimeError: Connection closed by peer'
)
LOADER = (
    'Traceback (most recent call last):\n  File "dataloader.py", line 1291, in _try_get_data\n'
    "RuntimeError: DataLoader worker (pid 12) is killed by signal: Killed. \n\n"
    "The above exception was the direct cause of the following exception:\n\n"
    'Traceback (most recent call last):\n  File "train.py", line 9, in main\n'
    "RuntimeError: DataLoader worker (pid(s) 12) exited unexpectedly"
)


class Row(NamedTuple):
    name: str
    cause: str
    then: str
    facts: dict[str, Any]
    kernel: str = ""


def raised(text: str, **more: Any) -> dict[str, Any]:
    return {"exit_code": 1, "exception": text, **more}


TABLE = (
    # usage
    Row("no such module", "usage", "hs", raised("ModuleNotFoundError: No module named 'apex'")),
    Row("cannot import", "usage", "hs", raised("ImportError: cannot import name 'x' from 'y'")),
    Row("bad syntax", "usage", "hs", raised("SyntaxError: invalid syntax (train.py, line 3)")),
    Row("bad indentation", "usage", "hs", raised("IndentationError: unexpected indent (train.py, line 3)")),
    Row("missing file", "usage", "hs", raised("FileNotFoundError: [Errno 2] No such file or directory: 'data.csv'")),
    Row("no permission", "usage", "hs", raised("PermissionError: [Errno 13] Permission denied: '/data'")),
    Row("a folder instead of a file", "usage", "hs", raised("IsADirectoryError: [Errno 21] Is a directory: '/data'")),
    Row("argparse", "usage", "hs", {"exit_code": 2, "stderr_tail": ("usage: t", "t.py: error: argument --lr: x")}),
    Row("click", "usage", "hs", {"exit_code": 2, "stderr_tail": ("Usage: t", "Error: No such option: --lr")}),
    Row("exit 2 without a word", "usage", "hs", {"exit_code": 2}),
    Row(
        "no such script", "usage", "hs", {"exit_code": 2, "stderr_tail": ("/usr/bin/python3: can't open file 'x.py'",)}
    ),
    Row(
        "-m without a module", "usage", "hs", {"exit_code": 1, "stderr_tail": ("/usr/bin/python3: No module named x",)}
    ),
    Row("a shell finds no command", "usage", "hs", {"exit_code": 127}),
    Row("a shell may not run it", "usage", "hs", {"exit_code": 126}),
    Row("no such program", "usage", "hs", {"reason": "cannot run x: No such file or directory", "spawn_errno": 2}),
    Row(
        "checkpoint of another model",
        "usage",
        "hs",
        raised(
            "RuntimeError: Error(s) in loading state_dict for Net:\n\t"
            "size mismatch for fc.weight: copying a param with shape torch.Size([4]) from checkpoint"
        ),
    ),
    Row("checkpoint without a key", "usage", "hs", raised('RuntimeError: Missing key(s) in state_dict: "fc.bias".')),
    Row(
        "optimizer of another model",
        "usage",
        "hs",
        raised(
            "ValueError: loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
        ),
    ),
    Row("shapes", "usage", "hs", raised("RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x4 and 5x2)")),
    Row("sizes", "usage", "hs", raised("RuntimeError: The size of tensor a (3) must match the size of tensor b (4)")),
    Row("view", "usage", "hs", raised("RuntimeError: shape '[3, 4]' is invalid for input of size 10")),
    Row(
        "more ranks than devices",
        "usage",
        "hs",
        raised(f"RuntimeError: CUDA error: invalid device ordinal{CUDA_ADVICE}"),
    ),
    Row("a torch without CUDA", "usage", "hs", raised("AssertionError: Torch not compiled with CUDA enabled")),
    Row(
        "two ranks on one device",
        "usage",
        "hs",
        raised(
            "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, "
            "invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9\n"
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
            "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60"
        ),
    ),
    Row(
        "CUDA in a forked loader",
        "usage",
        "hs",
        raised(
            "RuntimeError: Caught RuntimeError in DataLoader worker process 0.\n"
            "Original Traceback (most recent call last):\n"
            '  File "/lib/torch/cuda/__init__.py", line 466, in _lazy_init\n    raise RuntimeError(\n'
            "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must "
            "use the 'spawn' start method"
        ),
    ),
    # data
    Row("a broken archive", "data", "hs", raised("zipfile.BadZipFile: File is not a zip file")),
    Row("a broken picture", "data", "hs", raised("PIL.UnidentifiedImageError: cannot identify image file '/d/7.jpg'")),
    Row("a cut picture", "data", "hs", raised("OSError: image file is truncated (12 bytes not processed)")),
    Row("a bad line of JSON", "data", "hs", raised("json.decoder.JSONDecodeError: Expecting value: line 7 column 1")),
    Row("bad text", "data", "hs", raised("UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 12")),
    Row("a cut pickle", "data", "hs", raised("_pickle.UnpicklingError: pickle data was truncated")),
    Row(
        "a cut checkpoint",
        "data",
        "hs",
        raised("RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory"),
    ),
    Row("safetensors", "data", "hs", raised("safetensors_rust.SafetensorError: Error while deserializing header")),
    Row("the script says so", "data", "hs", raised("ValueError: corrupt sample 1234 in shard-7.tar")),
    # memory
    Row("host memory, counted", "host-oom", "hh", {"signal": "SIGKILL", "exit_code": None, "oom": SURE}),
    Row("a child was killed", "host-oom", "hh", raised("RuntimeError: x", oom=SURE)),
    Row(
        "host memory, by the kernel's log",
        "host-oom",
        "hh",
        {"signal": "SIGKILL", "exit_code": None, "pid": 77},
        "Memory cgroup out of memory: Killed process 77 (python3) total-vm:57976kB, anon-rss:48232kB",
    ),
    Row(
        "another process was killed",
        "unknown",
        "hh",
        {"signal": "SIGKILL", "exit_code": None, "pid": 76},
        "Out of memory: Killed process 77 (python3) total-vm:57976kB",
    ),
    Row("a kill that may be memory's", "unknown", "hh", {"signal": "SIGKILL", "exit_code": None, "oom": GUESS}),
    Row("MemoryError", "host-oom", "hh", raised("MemoryError")),
    Row(
        "no memory for numpy",
        "host-oom",
        "hh",
        raised("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8 TiB: MemoryError"),
    ),
    Row(
        "torch's allocator",
        "host-oom",
        "hh",
        raised(
            "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. "
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000 bytes"
        ),
    ),
    Row("C++", "host-oom", "hh", raised("RuntimeError: std::bad_alloc")),
    Row(
        "a loader was killed",
        "host-oom",
        "hh",
        raised("RuntimeError: DataLoader worker (pid 12) is killed by signal: Killed. "),
    ),
    Row(
        "a loader was killed, as torch raises it",
        "host-oom",
        "hh",
        raised("RuntimeError: DataLoader worker (pid(s) 12) exited unexpectedly", traceback=LOADER),
    ),
    Row("shared memory", "host-oom", "hh", raised("RuntimeError: unable to write: insufficient shared memory (shm)")),
    Row("cannot fork", "host-oom", "hh", {"reason": "cannot fork a worker", "spawn_errno": 12}),
    Row(
        "device memory",
        "device-oom",
        "hh",
        raised("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
    ),
    Row("device memory, older", "device-oom", "hh", raised("torch.cuda.OutOfMemoryError: CUDA out of memory.")),
    Row(
        "cuBLAS has no memory",
        "device-oom",
        "hh",
        raised("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ),
    Row(
        "NCCL has no memory",
        "device-oom",
        "hh",
        {"exit_code": 1, "stderr_tail": ("NCCL WARN Failed to CUDA malloc 4 bytes",)},
    ),
    Row("HIP", "device-oom", "hh", raised("RuntimeError: HIP out of memory. Tried to allocate 2.00 GiB")),
    # device and link
    Row(
        "off the bus",
        "device",
        "ee",
        raised(f"RuntimeError: CUDA error: unspecified launch failure{CUDA_ADVICE}"),
        XID.format(79, "GPU has fallen off the bus."),
    ),
    Row("double-bit ECC", "device", "ee", {"signal": "SIGABRT", "exit_code": None}, XID.format(48, "DBE")),
    Row(
        "uncontained ECC",
        "device",
        "ee",
        raised(f"RuntimeError: CUDA error: uncorrectable ECC error encountered{CUDA_ADVICE}"),
    ),
    Row("NVLink", "device", "ee", raised("RuntimeError: x"), XID.format(74, "NVLink: fatal error detected on link 3")),
    Row(
        "GSP",
        "device",
        "ee",
        {"signal": "SIGKILL", "exit_code": None},
        XID.format(119, "Timeout waiting for RPC from GSP0"),
    ),
    Row("NVML", "device", "ee", raised("pynvml.NVMLError_GpuIsLost: GPU is lost")),
    Row("no driver", "device", "ee", raised("RuntimeError: Found no NVIDIA driver on your system. Please check that")),
    Row("no device is left", "device", "ee", raised("RuntimeError: no CUDA-capable device is detected")),
    Row(
        "a busy device",
        "device",
        "ee",
        raised("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    ),
    Row(
        "InfiniBand",
        "device",
        "ee",
        {
            "exit_code": 1,
            "stderr_tail": (
                "n1:7:9 [0] net_ib.cc:1 NCCL WARN NET/IB : Got completion from peer with status=12 opcode=0 error",
            ),
        },
    ),
    Row(
        "the card's firmware",
        "device",
        "ee",
        raised("RuntimeError: x"),
        "mlx5_core 0000:31:00.0: health compromised - fatal",
    ),
    Row(
        "NCCL's remote error",
        "device",
        "ee",
        raised(
            "torch.distributed.DistBackendError: NCCL error: remote process exited "
            "or there was a network error, NCCL 2.27.7\nncclRemoteError: A call failed possibly due to a network error"
        ),
    ),
    Row(
        "AMD", "device", "ee", {"signal": "SIGABRT", "exit_code": None}, "amdgpu 0000:03:00.0: amdgpu: GPU reset begin!"
    ),
    # what the kernel says of programs is no fault of a device
    Row(
        "an illegal address",
        "crash",
        "hh",
        raised(f"RuntimeError: CUDA error: an illegal memory access{CUDA_ADVICE}"),
        XID.format(31, "Ch 00000010, intr 00000000. MMU Fault: ENGINE GRAPHICS"),
    ),
    Row("what follows from an end", "crash", "hh", raised("RuntimeError: x"), XID.format(45, "Ch 00000010")),
    # network
    Row(
        "a peer is gone", "network", "hh", raised("RuntimeError: [enforce fail] Connection closed by peer [10.0.0.1]:1")
    ),
    Row("reset", "network", "hh", raised("ConnectionResetError: [Errno 104] Connection reset by peer")),
    Row(
        "refused",
        "network",
        "hh",
        raised(
            "torch.distributed.DistNetworkError: The client socket has failed to connect to "
            "any network address of (h, 1)"
        ),
    ),
    Row("no such host", "network", "hh", raised("socket.gaierror: [Errno -2] Name or service not known")),
    Row("no route", "network", "hh", raised("OSError: [Errno 113] No route to host")),
    Row(
        "the store", "network", "hh", raised("torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /x")
    ),
    Row("NCCL's socket", "network", "hh", raised("torch.distributed.DistBackendError: NCCL error: ncclSystemError")),
    Row("a pipe", "network", "hh", raised("BrokenPipeError: [Errno 32] Broken pipe")),
    Row(
        "a port that is taken",
        "network",
        "hh",
        {"exit_code": None, "reason": "has no store: cannot listen on MASTER_PORT 29777: Address already in use"},
    ),
    # disks
    Row("no space", "disk", "hh", raised("OSError: [Errno 28] No space left on device")),
    Row("a quota", "disk", "hh", raised("OSError: [Errno 122] Disk quota exceeded: '/home/u/out.pt'")),
    Row("torch.save to a path", "disk", "hh", raised("RuntimeError: basic_ios::clear: iostream error")),
    Row("read-only", "disk", "hh", raised("OSError: [Errno 30] Read-only file system: '/scratch/log'")),
    Row(
        "torch.save without space",
        "disk",
        "hh",
        raised("RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"),
    ),
    Row("no shared memory", "host-oom", "hh", raised("OSError: [Errno 28] No space left on device: '/dev/shm/x'")),
    # ends from outside
    Row("SIGTERM from outside", "preemption", "hh", {"signal": "SIGTERM", "exit_code": None}),
    Row(
        "Slurm preempts",
        "preemption",
        "hh",
        {
            "exit_code": 1,
            "stderr_tail": (
                "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-24T10:00:00 DUE TO PREEMPTION ***",
            ),
        },
    ),
    Row(
        "Slurm's time limit",
        "time-limit",
        "hh",
        {
            "exit_code": 1,
            "stderr_tail": (
                "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-24T10:00:00 DUE TO TIME LIMIT ***",
            ),
        },
    ),
    Row("CPU time", "time-limit", "hh", {"signal": "SIGXCPU", "exit_code": None}),
    # hangs
    Row("found by the agent", "hang", "hh", {"exit_code": None, "hung": True, "reason": "hung: no sign of life"}),
    Row(
        "found by torch",
        "hang",
        "hh",
        raised(
            "torch.distributed.DistBackendError: [Rank 0] Watchdog caught collective "
            "operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE) ran for 600000 milliseconds"
        ),
    ),
    Row(
        "found by gloo",
        "hang",
        "hh",
        raised("RuntimeError: Timed out waiting 1800000ms for recv operation to complete"),
    ),
    # the program
    Row("an error of its own", "crash", "hh", raised("ValueError: loss is nan")),
    Row("a name", "crash", "hh", raised("NameError: name 'x' is not defined")),
    Row("an assertion", "crash", "hh", raised("AssertionError")),
    Row(
        "SIGSEGV",
        "crash",
        "hh",
        {"signal": "SIGSEGV", "exit_code": None, "exception": "Fatal Python error: Segmentation fault"},
    ),
    Row("SIGABRT", "crash", "hh", {"signal": "SIGABRT", "exit_code": None}),
    Row("SIGILL", "crash", "hh", {"signal": "SIGILL", "exit_code": None}),
    Row("SIGSEGV below a shell", "crash", "hh", {"exit_code": 139}),
    Row("it gives up", "gave-up", "s", raised("muster.worker.give_up: no learning rate works", wish="stop")),
    Row("it gives up at a lack of memory", "gave-up", "s", raised("muster.worker.give_up: CUDA OOM", wish="stop")),
    Row("it leaves the node", "device", "ee", raised("muster.worker.leave_node: the GPU is slow", wish="elsewhere")),
    # what is no cause
    Row(
        "advice is no cause",
        "crash",
        "hh",
        raised(
            "RuntimeError: CUDA error: an illegal instruction"
            "\nThis may be caused by a device that has fallen off the bus"
        ),
    ),
    Row(
        "a warning is no cause",
        "unknown",
        "hh",
        {"exit_code": 1, "stderr_tail": ("UserWarning: CUDA out of memory was near",)},
    ),
    Row(
        "what is fetched because there is no file",
        "network",
        "hh",
        raised(
            "ConnectionError: Connection refused",
            traceback=HANDLING.replace("EOFError: Ran out of input", "FileNotFoundError: 'cached.json'"),
        ),
    ),
    Row(
        "an answer of a server, because there is no file",
        "crash",
        "hh",
        raised(
            "requests.HTTPError: 503 Server Error",
            traceback=HANDLING.replace("EOFError: Ran out of input", "FileNotFoundError: 'cached.json'"),
        ),
    ),
    Row(
        "a line of the program about a file",
        "usage",
        "hh",
        {"exit_code": 1, "stderr_tail": ("FileNotFoundError: no cached.json, it is fetched", "done")},
    ),
    Row("clean-up is no cause", "data", "hs", raised("RuntimeError: Connection closed by peer", traceback=HANDLING)),
    # the preflight
    Row(
        "seven of eight devices",
        "device",
        "s",
        {"check": "devices", "reason": "7 devices answer, expected 8 (--devices)", "exit_code": None},
    ),
    Row(
        "no driver of a GPU",
        "device",
        "s",
        {"check": "driver", "reason": "no driver of a GPU is loaded, expected 8 devices", "exit_code": None},
    ),
    Row(
        "MASTER_ADDR is not reached",
        "network",
        "s",
        {"check": "reach", "reason": "MASTER_ADDR 10.0.0.1 (port 2000) cannot be reached", "exit_code": None},
    ),
    # nothing is known
    Row("a bare kill", "unknown", "hh", {"signal": "SIGKILL", "exit_code": None}),
    Row("a code without a word", "unknown", "hh", {"exit_code": 3}),
    Row("Ctrl-C", "unknown", "hh", {"signal": "SIGINT", "exit_code": None}),
)


def build(row: Row, run_time_s: float = 1.0) -> Failure:
    facts = dict(row.facts)
    spawn_errno = facts.pop("spawn_errno", None)
    line = parse_kernel_text(row.kernel) if row.kernel else None
    failure = make_failure(**facts)
    found = classify(failure, run_time_s, spawn_errno, () if line is None else (line,))
    return replace(failure, cause=found.cause, evidence=found.evidence, early=found.early)


def decide_twice(failure: Failure) -> str:
    """What follows, and what follows when the next attempt ends in the same way."""
    restarts, verdicts = Restarts(), ""
    for attempt in range(2):
        verdict = decide_verdict(failure, restarts, attempt, VerdictRules(max_restarts=9, stops_on_repeat=True))
        if verdict.final is not None:
            return verdicts + "s"
        restarts, verdicts = verdict.restarts, verdicts + ("e" if verdict.is_elsewhere else "h")
    return verdicts


def test_the_table_is_as_long_as_it_is_said_to_be() -> None:
    assert len({row.name for row in TABLE}) == len(TABLE) >= 60
    assert {row.cause for row in TABLE} == set(CLASSES)


@pytest.mark.parametrize("row", TABLE, ids=[row.name for row in TABLE])
def test_class_verdict_and_report_line(row: Row) -> None:
    failure = build(row)
    assert failure.cause == row.cause
    # What would repeat at once: its script reports its steps, and has done none.
    where = {} if row.cause != "data" else {"reports_steps": True}
    assert decide_twice(replace(failure, **where)) == row.then
    page = format_report(Report(run_id="r", reason="why", failures=(failure,)), columns=500)
    assert f"  cause     : {name_class(row.cause)}" in page


@pytest.mark.parametrize(
    "row", [row for row in TABLE if row.cause == "usage" and row.then == "hs" and "spawn_errno" not in row.facts]
)
def test_only_a_start_up_error_within_seconds_and_without_a_step_is_early(row: Row) -> None:
    assert build(row).early
    assert not build(row, run_time_s=3600.0).early
    assert not build(row._replace(facts={**row.facts, "step": 3})).early
    assert not build(row._replace(facts={**row.facts, "stopped_by_us": True})).early


def test_the_report_shows_what_the_class_was_found_by_unless_it_stands_there_anyway() -> None:
    [bus] = [build(row) for row in TABLE if row.name == "off the bus"]
    page = format_report(Report(run_id="r", reason="why", failures=(bus,)), columns=300)
    assert "  cause     : device or link (kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>'" in page
    [data] = [build(row) for row in TABLE if row.name == "a broken archive"]
    assert "  cause     : data\n" in format_report(Report(run_id="r", reason="why", failures=(data,)), columns=300)


def write_line(at_s: float, text: str) -> str:
    return f"3,12,{int(at_s * 1e6)},-;{text}\n"


def test_records_of_the_kernel_that_tell_of_a_failure_and_when() -> None:
    fatal = XID.format(79, "GPU has fallen off the bus.")
    texts = [
        write_line(11.0, fatal) + " SUBSYSTEM=pci\n",
        write_line(9.0, "usb 1-1: new device"),
        "damaged",
        "6,1,x,-;x",
    ]
    found = list(find_kernel_lines(text.encode() for text in texts))
    assert found == [(11.0, KernelLine(cause="device", text=f"kernel: {fatal}"))]
    assert KernelLog("/nothing/of/the/kind").read(0.0) == ()


def test_several_workers_fail_of_one_line_and_one_that_was_survived_is_no_cause(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text(write_line(5.0, "NVRM: Xid (PCI:0): 79, GPU has fallen off the bus."))
    log = KernelLog(str(path))
    assert len(log.read(4.0)) == len(log.read(4.0)) == 1
    assert log.read(6.0) == ()


def test_reading_the_kernel_s_log_leaves_what_was_there_before(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text(write_line(5.0, "NVRM: Xid (PCI:0): 79, GPU has fallen off the bus."))
    log = KernelLog(str(path))
    log.skip()
    assert log.read(0.0) == ()
    with path.open("a") as file:
        file.write(write_line(6.0, "Out of memory: Killed process 12 (python3)"))
    assert [line.pid for line in log.read(0.0)] == [12]
