"""The class of a failure, from what real programs, NCCL and kernels have written; and what follows, and the report.

Each row is one program or fault of a node, and what its agent learns of it. It stands below its class, and what follows
when it happens for the first time (h: restart here, e: elsewhere if a spare waits) and when it happens again in the
same way within seconds of the start (s: stop).
"""

from pathlib import Path
from typing import Any

import pytest
from doubles.samples import make_failure

from muster._shared.causes import CLASSES, name_class
from muster._shared.records import replace
from muster._shared.reports import FailedCheck, Failure, OomEvidence, Report
from muster.agent.diagnosis.classes import classify
from muster.agent.diagnosis.kernel_log import KernelLine, KernelLog, find_kernel_lines, parse_kernel_text
from muster.agent.diagnosis.report_text import format_report
from muster.agent.rendezvous.restarts import Restarts
from muster.agent.rendezvous.verdicts import VerdictRules, decide_verdict

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


def raised(text: str, **more: Any) -> dict[str, Any]:
    return {"exit_code": 1, "exception": text, **more}


TABLE: dict[str, dict[str, dict[str, Any]]] = {
    "usage hs": {
        "no such module": raised("ModuleNotFoundError: No module named 'apex'"),
        "a launch while a worker imports its program": raised("UsageError: a worker imports the program"),
        "cannot import": raised("ImportError: cannot import name 'x' from 'y'"),
        "bad syntax": raised("SyntaxError: invalid syntax (train.py, line 3)"),
        "bad indentation": raised("IndentationError: unexpected indent (train.py, line 3)"),
        "missing file": raised("FileNotFoundError: [Errno 2] No such file or directory: 'data.csv'"),
        "no permission": raised("PermissionError: [Errno 13] Permission denied: '/data'"),
        "a folder instead of a file": raised("IsADirectoryError: [Errno 21] Is a directory: '/data'"),
        "argparse": {"exit_code": 2, "stderr_tail": ("usage: t", "t.py: error: argument --lr: x")},
        "click": {"exit_code": 2, "stderr_tail": ("Usage: t", "Error: No such option: --lr")},
        "exit 2 without a word": {"exit_code": 2},
        "no such script": {"exit_code": 2, "stderr_tail": ("/usr/bin/python3: can't open file 'x.py'",)},
        "-m without a module": {"exit_code": 1, "stderr_tail": ("/usr/bin/python3: No module named x",)},
        "a shell finds no command": {"exit_code": 127},
        "a shell may not run it": {"exit_code": 126},
        "no open files left": {"reason": "cannot start x: Too many open files", "spawn_errno": 24},
        "no such program": {"reason": "cannot run x: No such file or directory", "spawn_errno": 2},
        "checkpoint of another model": raised(
            "RuntimeError: Error(s) in loading state_dict for Net:\n\t"
            "size mismatch for fc.weight: copying a param with shape torch.Size([4]) from checkpoint"
        ),
        "checkpoint without a key": raised('RuntimeError: Missing key(s) in state_dict: "fc.bias".'),
        "optimizer of another model": raised(
            "ValueError: loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
        ),
        "shapes": raised("RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x4 and 5x2)"),
        "sizes": raised("RuntimeError: The size of tensor a (3) must match the size of tensor b (4)"),
        "view": raised("RuntimeError: shape '[3, 4]' is invalid for input of size 10"),
        "more ranks than devices": raised(f"RuntimeError: CUDA error: invalid device ordinal{CUDA_ADVICE}"),
        "a torch without CUDA": raised("AssertionError: Torch not compiled with CUDA enabled"),
        "two ranks on one device": raised(
            "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, "
            "invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9\n"
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
            "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60"
        ),
        "CUDA in a forked loader": raised(
            "RuntimeError: Caught RuntimeError in DataLoader worker process 0.\n"
            "Original Traceback (most recent call last):\n"
            '  File "/lib/torch/cuda/__init__.py", line 466, in _lazy_init\n    raise RuntimeError(\n'
            "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must "
            "use the 'spawn' start method"
        ),
    },
    "data hs": {
        "a broken archive": raised("zipfile.BadZipFile: File is not a zip file"),
        "a broken picture": raised("PIL.UnidentifiedImageError: cannot identify image file '/d/7.jpg'"),
        "a cut picture": raised("OSError: image file is truncated (12 bytes not processed)"),
        "a bad line of JSON": raised("json.decoder.JSONDecodeError: Expecting value: line 7 column 1"),
        "bad text": raised("UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 12"),
        "a cut pickle": raised("_pickle.UnpicklingError: pickle data was truncated"),
        "a cut checkpoint": raised(
            "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory"
        ),
        "safetensors": raised("safetensors_rust.SafetensorError: Error while deserializing header"),
        "the script says so": raised("ValueError: corrupt sample 1234 in shard-7.tar"),
        "clean-up is no cause": raised("RuntimeError: Connection closed by peer", traceback=HANDLING),
    },
    "host-oom hh": {
        "host memory, counted": {"signal": "SIGKILL", "exit_code": None, "oom": SURE},
        "a child was killed": raised("RuntimeError: x", oom=SURE),
        "host memory, by the kernel's log": {
            "signal": "SIGKILL",
            "exit_code": None,
            "pid": 77,
            "kernel": "Memory cgroup out of memory: Killed process 77 (python3) total-vm:57976kB, anon-rss:48232kB",
        },
        "MemoryError": raised("MemoryError"),
        "no memory for numpy": raised(
            "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8 TiB: MemoryError"
        ),
        "torch's allocator": raised(
            "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. "
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000 bytes"
        ),
        "C++": raised("RuntimeError: std::bad_alloc"),
        "a loader was killed": raised("RuntimeError: DataLoader worker (pid 12) is killed by signal: Killed. "),
        "a loader was killed, as torch raises it": raised(
            "RuntimeError: DataLoader worker (pid(s) 12) exited unexpectedly", traceback=LOADER
        ),
        "shared memory": raised("RuntimeError: unable to write: insufficient shared memory (shm)"),
        "cannot fork": {"reason": "cannot fork a worker", "spawn_errno": 12},
        "no shared memory": raised("OSError: [Errno 28] No space left on device: '/dev/shm/x'"),
    },
    "unknown hh": {
        "another process was killed": {
            "signal": "SIGKILL",
            "exit_code": None,
            "pid": 76,
            "kernel": "Out of memory: Killed process 77 (python3) total-vm:57976kB",
        },
        "a kill that may be memory's": {"signal": "SIGKILL", "exit_code": None, "oom": GUESS},
        "a warning is no cause": {"exit_code": 1, "stderr_tail": ("UserWarning: CUDA out of memory was near",)},
        # nothing is known
        "a bare kill": {"signal": "SIGKILL", "exit_code": None},
        "a code without a word": {"exit_code": 3},
        "Ctrl-C": {"signal": "SIGINT", "exit_code": None},
    },
    "device-oom hh": {
        "device memory": raised("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
        "device memory, older": raised("torch.cuda.OutOfMemoryError: CUDA out of memory."),
        "cuBLAS has no memory": raised(
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
        ),
        "NCCL has no memory": {"exit_code": 1, "stderr_tail": ("NCCL WARN Failed to CUDA malloc 4 bytes",)},
        "HIP": raised("RuntimeError: HIP out of memory. Tried to allocate 2.00 GiB"),
    },
    "device ee": {
        # device and link
        "off the bus": raised(
            f"RuntimeError: CUDA error: unspecified launch failure{CUDA_ADVICE}",
            kernel=XID.format(79, "GPU has fallen off the bus."),
        ),
        "double-bit ECC": {"signal": "SIGABRT", "exit_code": None, "kernel": XID.format(48, "DBE")},
        "uncontained ECC": raised(f"RuntimeError: CUDA error: uncorrectable ECC error encountered{CUDA_ADVICE}"),
        "NVLink": raised("RuntimeError: x", kernel=XID.format(74, "NVLink: fatal error detected on link 3")),
        "GSP": {"signal": "SIGKILL", "exit_code": None, "kernel": XID.format(119, "Timeout waiting for RPC from GSP0")},
        "NVML": raised("pynvml.NVMLError_GpuIsLost: GPU is lost"),
        "no driver": raised("RuntimeError: Found no NVIDIA driver on your system. Please check that"),
        "no device is left": raised("RuntimeError: no CUDA-capable device is detected"),
        "a busy device": raised("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
        "InfiniBand": {
            "exit_code": 1,
            "stderr_tail": (
                "n1:7:9 [0] net_ib.cc:1 NCCL WARN NET/IB : Got completion from peer with status=12 opcode=0 error",
            ),
        },
        "the card's firmware": raised("RuntimeError: x", kernel="mlx5_core 0000:31:00.0: health compromised - fatal"),
        "NCCL's remote error": raised(
            "torch.distributed.DistBackendError: NCCL error: remote process exited "
            "or there was a network error, NCCL 2.27.7\nncclRemoteError: A call failed possibly due to a network error"
        ),
        "AMD": {"signal": "SIGABRT", "exit_code": None, "kernel": "amdgpu 0000:03:00.0: amdgpu: GPU reset begin!"},
        "it leaves the node": raised("muster.worker.leave_node: the GPU is slow", requested_verdict="elsewhere"),
    },
    "crash hh": {
        # what the kernel says of programs is no fault of a device
        "an illegal address": raised(
            f"RuntimeError: CUDA error: an illegal memory access{CUDA_ADVICE}",
            kernel=XID.format(31, "Ch 00000010, intr 00000000. MMU Fault: ENGINE GRAPHICS"),
        ),
        "what follows from an end": raised("RuntimeError: x", kernel=XID.format(45, "Ch 00000010")),
        "an error of its own": raised("ValueError: loss is nan"),
        "a name": raised("NameError: name 'x' is not defined"),
        "an assertion": raised("AssertionError"),
        "SIGSEGV": {"signal": "SIGSEGV", "exit_code": None, "exception": "Fatal Python error: Segmentation fault"},
        "SIGABRT": {"signal": "SIGABRT", "exit_code": None},
        "SIGILL": {"signal": "SIGILL", "exit_code": None},
        "SIGSEGV below a shell": {"exit_code": 139},
        # what is no cause
        "advice is no cause": raised(
            "RuntimeError: CUDA error: an illegal instruction"
            "\nThis may be caused by a device that has fallen off the bus"
        ),
        "an answer of a server, because there is no file": raised(
            "requests.HTTPError: 503 Server Error",
            traceback=HANDLING.replace("EOFError: Ran out of input", "FileNotFoundError: 'cached.json'"),
        ),
    },
    "network hh": {
        "a peer is gone": raised("RuntimeError: [enforce fail] Connection closed by peer [10.0.0.1]:1"),
        "reset": raised("ConnectionResetError: [Errno 104] Connection reset by peer"),
        "refused": raised(
            "torch.distributed.DistNetworkError: The client socket has failed to connect to "
            "any network address of (h, 1)"
        ),
        "no such host": raised("socket.gaierror: [Errno -2] Name or service not known"),
        "no route": raised("OSError: [Errno 113] No route to host"),
        "the store": raised("torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /x"),
        "NCCL's socket": raised("torch.distributed.DistBackendError: NCCL error: ncclSystemError"),
        "a pipe": raised("BrokenPipeError: [Errno 32] Broken pipe"),
        "a port that is taken": {
            "exit_code": None,
            "reason": "has no store: cannot listen on MASTER_PORT 29777: Address already in use",
        },
        "what is fetched because there is no file": raised(
            "ConnectionError: Connection refused",
            traceback=HANDLING.replace("EOFError: Ran out of input", "FileNotFoundError: 'cached.json'"),
        ),
    },
    "disk hh": {
        "no space": raised("OSError: [Errno 28] No space left on device"),
        "a quota": raised("OSError: [Errno 122] Disk quota exceeded: '/home/u/out.pt'"),
        "torch.save to a path": raised("RuntimeError: basic_ios::clear: iostream error"),
        "read-only": raised("OSError: [Errno 30] Read-only file system: '/scratch/log'"),
        "torch.save without space": raised(
            "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"
        ),
    },
    "preemption hh": {
        # ends from outside
        "SIGTERM from outside": {"signal": "SIGTERM", "exit_code": None},
        "Slurm preempts": {
            "exit_code": 1,
            "stderr_tail": (
                "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-24T10:00:00 DUE TO PREEMPTION ***",
            ),
        },
    },
    "time-limit hh": {
        "Slurm's time limit": {
            "exit_code": 1,
            "stderr_tail": (
                "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-24T10:00:00 DUE TO TIME LIMIT ***",
            ),
        },
        "CPU time": {"signal": "SIGXCPU", "exit_code": None},
    },
    "hang hh": {
        "found by the agent": {"exit_code": None, "hung": True, "reason": "no sign of life"},
        "found by torch": raised(
            "torch.distributed.DistBackendError: [Rank 0] Watchdog caught collective "
            "operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE) ran for 600000 milliseconds"
        ),
        "found by gloo": raised("RuntimeError: Timed out waiting 1800000ms for recv operation to complete"),
    },
    "gave-up s": {
        "it gives up": raised("muster.worker.give_up: no learning rate works", requested_verdict="stop"),
        "it gives up at a lack of memory": raised("muster.worker.give_up: CUDA OOM", requested_verdict="stop"),
    },
    "usage hh": {
        "a line of the program about a file": {
            "exit_code": 1,
            "stderr_tail": ("FileNotFoundError: no cached.json, it is fetched", "done"),
        }
    },
    "device s": {
        "seven of eight devices": {
            "check": FailedCheck(feature="preflight", name="devices", cause="device"),
            "reason": "7 devices answer, expected 8 (--devices)",
            "exit_code": None,
        },
    },
    "network s": {
        "MASTER_ADDR is not reached": {
            "check": FailedCheck(feature="preflight", name="reach", cause="network"),
            "reason": "MASTER_ADDR 10.0.0.1 (port 2000) cannot be reached",
            "exit_code": None,
        }
    },
}


ROWS = [(*key.split(), name, facts) for key, rows in TABLE.items() for name, facts in rows.items()]


def build(facts: dict[str, Any], run_time_s: float = 1.0) -> Failure:
    known = {name: value for name, value in facts.items() if name not in ("spawn_errno", "kernel")}
    line = parse_kernel_text(facts.get("kernel", ""))
    failure = make_failure(**known)
    found = classify(failure, run_time_s, facts.get("spawn_errno"), () if line is None else (line,))
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


def test_the_table_has_every_class() -> None:
    assert {cause for cause, *_ in ROWS} == set(CLASSES)


@pytest.mark.parametrize(("cause", "then", "facts"), [pytest.param(a, b, facts, id=name) for a, b, name, facts in ROWS])
def test_class_verdict_and_report_line(cause: str, then: str, facts: dict[str, Any]) -> None:
    failure = build(facts)
    assert failure.cause == cause
    # What would repeat at once: its script reports its steps, and has done none.
    where = {} if cause != "data" else {"reports_steps": True}
    assert decide_twice(replace(failure, **where)) == then
    page = format_report(Report(run_id="r", reason="why", failures=(failure,)), columns=500)
    assert f"  cause     : {name_class(cause)}" in page


@pytest.mark.parametrize("name", [name for name, facts in TABLE["usage hs"].items() if "spawn_errno" not in facts])
def test_only_a_start_up_error_within_seconds_and_without_a_step_is_early(name: str) -> None:
    facts = TABLE["usage hs"][name]
    assert build(facts).early
    assert not build(facts, run_time_s=3600.0).early
    assert not build({**facts, "step": 3}).early
    assert not build({**facts, "stopped_by_us": True}).early


def test_the_report_shows_what_the_class_was_found_by_unless_it_stands_there_anyway() -> None:
    bus, data = build(TABLE["device ee"]["off the bus"]), build(TABLE["data hs"]["a broken archive"])
    page = format_report(Report(run_id="r", reason="why", failures=(bus,)), columns=300)
    assert "(kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>'" in page
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
