"""Parses what Python and torch write of an exception: error files, tracebacks, fatal errors, faulthandler's stacks.

A program writes the same traceback in several places: on stderr, there again with torch's `[rank2]: ` before each line,
and in the error file. Readers see it once, and without frames that are not theirs.
"""

import re
from collections.abc import Callable, Iterable, Iterator

from muster._shared.foreign_files import parse_json, read_regular

_ERROR_FILE_LIMIT_BYTES = 4 << 20
_TRACEBACK_LINES = 60
_EXCEPTION_CHARS = 2000
_FATAL = "Fatal Python error: "
_UNCAUGHT = re.compile(r"^terminate called after throwing an instance of '([^']+)'\n  what\(\): +(.+)", re.MULTILINE)
"""What libstdc++ prints of an exception of C++ that nothing has caught, before it aborts the process."""
_TRACEBACK = "Traceback (most recent call last):"
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
"""Source: torch/distributed/distributed_c10d.py, the exception hook that init_process_group installs."""
_GROUP = re.compile(
    r"^  \+ Exception Group Traceback.*\n(?: +[|+].*\n)*?.*- 1 -+\n((?: +\|.*\n)+) *\+--.*(?:\n +[|+].*)*", re.MULTILINE
)
"""A group of exceptions, and its first exception that is no group itself."""
_MARGIN = re.compile(r"^ +\| ?", re.MULTILINE)
_OWN_FRAMES = ("muster/agent/workers/", "muster/elastic/jobs/function.py")
"""Our frames at the outer end of a stack, which explain nothing."""
_START = re.compile(r'muster/agent/workers/program\.py", line \d+ in main$')
"""Where a worker begins. Outside of it is the zip that travels with a job, and what starts the zip."""
_RUNPY = ("<frozen runpy>", "/runpy.py")
"""Runs what is started by `-m`."""
_FORK_FRAMES = "muster/elastic/fork/"
"""Frames in a fork of the program that started the job. Outside of them is that program, at the place where it started
the job."""
_CURRENT = "Current thread 0x"
_THREADS = ("Thread 0x", _CURRENT)
_WAITING_FILES = ("/threading.py", "/queue.py", "/selectors.py", "/multiprocessing/connection.py", "/futures/thread.py")
_WAITING_FUNCTIONS = ("wait", "_wait_for_tstate_lock", "join", "get", "select", "poll", "_poll", "_worker", "_recv")
"""Functions of these files at the inner end of a thread that waits for another."""
_FORMATTING = ("/linecache.py", "/traceback.py", "/tokenize.py", "/torch/library.py", "/weakref.py")
"""Files at the inner end of a stack if a worker is already printing its exception, or ends."""


# -- where an exception is recorded -----------------------------------------------------------------------------------


def read_error_file(path: str | None) -> tuple[str, str | None] | None:
    """Read (exception, traceback) from an error file in torch's format; None if there is no such file.

    Source: torch/distributed/elastic/multiprocessing/errors/error_handler.py. `message` is an object if `@record` wrote
    it, and plain text from other writers.
    """
    data = load_error_file(path)
    message = data.get("message") if data else None
    if isinstance(message, str):
        return _shorten(message), None
    if not isinstance(message, dict):
        return None
    extra = message.get("extraInfo")
    stack = extra.get("py_callstack") if isinstance(extra, dict) else None
    text = message.get("message")
    exception = _shorten(str(text)).removesuffix(":") if text is not None else "unknown error"
    if not (isinstance(stack, str) and stack):
        return exception, None
    if stack.rstrip().endswith("---"):  # a group
        exception, _ = read_stderr(stack) or (exception, None)
    return exception, trim_traceback(_open_groups(stack))


def load_error_file(path: str | None) -> dict[str, object] | None:
    """Load the file's JSON object; None if it cannot be read or parsed."""
    if not path:
        return None
    try:
        data = parse_json(read_regular(path, _ERROR_FILE_LIMIT_BYTES))
    except (OSError, ValueError):  # incomplete: worker killed
        return None
    return data if isinstance(data, dict) else None


def read_stderr(text: str) -> tuple[str, str | None] | None:
    """Find (exception, traceback) in a Python program's stderr; None if it has neither."""
    text = _open_groups(strip_rank_prefix(text))
    fatal = text.rfind(_FATAL)
    if fatal >= 0:
        block = _arrange_fatal(text[fatal:].rstrip().split("\n"))
        exception, uncaught = block.split("\n", 1)[0], _UNCAUGHT.findall(text[:fatal])
        if uncaught and exception == f"{_FATAL}Aborted":
            exception += f" ({': '.join(uncaught[-1])})"
        return _shorten(exception), trim_traceback(block)
    start = text.rfind(_TRACEBACK)
    return _read_traceback(text[start:]) if start >= 0 else None


def _read_traceback(text: str) -> tuple[str, str | None] | None:
    """Split off a traceback: its frames are indented, and the first line after them that is not is the exception."""
    lines = text.rstrip().split("\n")
    for index, line in enumerate(lines[1:], start=1):
        if line and not line.startswith(" "):
            return _shorten(line), trim_traceback("\n".join(lines[: index + 1]))
    return None


def strip_rank_prefix(text: str) -> str:
    """Remove torch's `[rank2]: ` from the beginning of each line."""
    return _RANK_PREFIX.sub("", text)


def _open_groups(text: str) -> str:
    """Replace each group of exceptions by its first exception."""
    return _GROUP.sub(_open_group, text)


def _open_group(group: "re.Match[str]") -> str:
    text = _MARGIN.sub("", group[1])
    return text if text.startswith(_TRACEBACK) else f"{_TRACEBACK}\n{text}"


def trim_traceback(text: str) -> str:
    """Keep a long traceback's first line and its last frames."""
    lines = text.rstrip().split("\n")
    if len(lines) <= _TRACEBACK_LINES:
        return "\n".join(lines)
    # A fatal error lists its innermost frames first, an exception last.
    if text.startswith(_FATAL):
        return "\n".join([*lines[:_TRACEBACK_LINES], "  ..."])
    return "\n".join([lines[0], "  ...", *lines[-_TRACEBACK_LINES:]])


_FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>.+)$', re.MULTILINE)
"""A frame of a traceback, or of faulthandler's stacks, which have no comma."""
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")
_OURS = ("/muster/worker.py", "/muster/snapshots/")
"""What a program calls of muster, which travels with the job outside of the libraries' folders."""


def find_place(traceback: str) -> tuple[str, str] | None:
    """Return where the program raised it, `train.py, line 12` and the function; None if there is no frame.

    This is the innermost frame outside of libraries, or if there is none, the innermost of all.
    """
    frames = list(_FRAME.finditer(traceback))
    if not traceback.startswith(_FATAL):  # innermost last, unlike faulthandler
        frames.reverse()
    own = (frame for frame in frames if not any(part in frame["file"] for part in (*_LIBRARIES, *_OURS)))
    found = next(own, next(iter(frames), None))
    return None if found is None else (f"{found['file']}, line {found['line']}", found["function"])


def has_printed(tail: Iterable[str], exception: str | None, traceback: str | None = None) -> bool:
    """Return whether the last lines of stderr have the exception, so that its traceback is there as well.

    Args:
        tail: lines, oldest first.
        exception: as the report has it.
        traceback: its text, if there is one.
    """
    if not exception:
        return False
    first = _find_printed_line(exception, traceback)[:400]
    return any(first in line for line in tail)


def _find_printed_line(exception: str, traceback: str | None) -> str:
    """Return the first line of the exception as Python prints it, without the parentheses that we have added."""
    if exception.startswith(_FATAL):
        return exception.partition(" (")[0]
    last = traceback.rstrip().rpartition("\n")[2] if traceback else ""
    return last if last and exception.startswith(f"{last} (") else exception.splitlines()[0]


def _shorten(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _EXCEPTION_CHARS else text[:_EXCEPTION_CHARS] + " ..."


# -- without repetition -----------------------------------------------------------------------------------------------


def remove_traceback(tail: Iterable[str], exception: str | None, traceback: str | None) -> list[str]:
    """Return the last lines of stderr without the traceback that is shown beside them.

    Args:
        tail: lines, oldest first; the first may lie within the traceback.
        exception: the one that is shown.
        traceback: its text, if that is shown.
    """
    lines = _open_groups(strip_rank_prefix("\n".join(tail))).split("\n")
    if not exception:
        return lines
    first, rest = _find_printed_line(exception, traceback), exception.splitlines()[1:]
    start = _find_last(lines, lambda line: line.startswith(_FATAL))
    if start is not None:
        return lines[:start]  # the last part
    end = _find_last(lines, lambda line: line.endswith(first) or line.startswith(first[:400]))
    if end is None:
        return lines
    start = _find_last(lines[:end], lambda line: line == _TRACEBACK)
    has_frames = traceback is not None and start is None and all(line.startswith(" ") for line in lines[:end])
    kept = [] if has_frames else lines[: end if start is None else start]
    left = [*rest]
    for line in lines[end + 1 :]:
        if line in left:
            left.remove(line)
        else:
            kept.append(line)
    return kept


def _find_last(lines: list[str], matches: Callable[[str], object]) -> int | None:
    return next((index for index in range(len(lines) - 1, -1, -1) if matches(lines[index])), None)


# -- faulthandler's stacks --------------------------------------------------------------------------------------------


def clean_stacks(text: str) -> str:
    """Return the stacks of one process without our frames, threads without Python, and frames that print an exception.

    The thread that handled the signal, usually the main thread, comes first; faulthandler begins with the youngest.
    Threads of libraries that wait for work become one line at the end.
    """
    return _arrange(block for each in _split_blocks(text.strip().splitlines()) if (block := _clean_block(each)))


def list_frames(text: str) -> "list[re.Match[str]]":
    """Return the frames (file, line, function) of the thread that handled the signal, the innermost first.

    This is the main thread, unless that blocks signals.
    """
    block = next((each for each in _split_blocks(text.splitlines()) if each[0].startswith(_CURRENT)), [])
    return [frame for line in block if (frame := _FRAME.match(line)) is not None]


def is_of_program(frame: "re.Match[str]") -> bool:
    """Return whether a frame of a stack is neither of torch nor of Python."""
    return not any(part in frame["file"] for part in ("/torch/", "/lib/python", "<frozen "))


def put_program_first(text: str) -> str:
    """Put the innermost line of the program itself before stacks that begin in a library."""
    frames = list_frames(text)
    program = next(filter(is_of_program, frames), None)
    if program is None or program is frames[0]:
        return text
    return f"at {program['file']}:{program['line']} in {program['function']}\n{text}"


def _arrange_fatal(lines: list[str]) -> str:
    """Arrange the stacks of a fatal error after its first lines, without the list of extension modules."""
    lines = list(_drop_own_frames(lines))
    end = next((index for index, line in enumerate(lines) if line.startswith("Extension modules:")), len(lines))
    start = next((index for index, line in enumerate(lines[:end]) if line.startswith(_THREADS)), end)
    texts = ["\n".join(lines[:start]).rstrip(), _arrange(_split_blocks(lines[start:end]))]
    return "\n\n".join(text for text in texts if text)


def _arrange(stacks: Iterable[list[str]]) -> str:
    blocks = sorted(stacks, key=lambda block: not block[0].startswith(_CURRENT))
    idle = {index: name for index, block in enumerate(blocks) if (name := _find_idle(block))}
    texts = ["\n".join(block) for index, block in enumerate(blocks) if index not in idle]
    if idle:
        helpers = f"{len(idle)} helper thread{'s' if len(idle) > 1 else ''}"
        texts.append(f"Not shown: {helpers} waiting for work ({', '.join(dict.fromkeys(idle.values()))})")
    return "\n\n".join(texts)


def _find_idle(block: list[str]) -> str | None:
    """Return the outermost file below `threading` of a library's waiting thread, as "tqdm/_monitor.py", or None."""
    if block[0].startswith(_CURRENT):
        return None
    frames = [frame for line in block if (frame := _FRAME.match(line)) is not None]
    if not (frames and _waits(frames[0]) and all(_is_library(frame["file"]) for frame in frames)):
        return None
    own = [frame["file"] for frame in frames if not frame["file"].endswith("/threading.py")]
    return "/".join(own[-1].split("/")[-2:]) if own else "threading.py"


def _waits(frame: "re.Match[str]") -> bool:
    return frame["file"].endswith(_WAITING_FILES) and frame["function"] in _WAITING_FUNCTIONS


def _is_library(file: str) -> bool:
    return any(part in file for part in _LIBRARIES)


def _split_blocks(lines: list[str]) -> Iterator[list[str]]:
    """Return one block per thread."""
    block: list[str] = []
    for line in lines:
        if line.startswith(_THREADS) and block:
            yield block
            block = []
        if line.strip():
            block.append(line)
    if block:
        yield block


def _clean_block(block: list[str]) -> list[str]:
    lines = [line for line in _drop_own_frames(block) if "<no Python frame>" not in line]
    head = [line for line in lines[:1] if line.startswith(_THREADS)]
    frames = lines[len(head) :]
    while frames and any(f'{name}"' in frames[0] for name in _FORMATTING):
        del frames[0]
    return [*head, *frames] if any(line.strip() != "Garbage-collecting" for line in frames) else []


def _drop_own_frames(lines: list[str]) -> list[str]:
    """Drop our frames from stacks that begin with each thread's innermost frame."""
    kept: list[str] = []
    is_outside = False
    for line in lines:
        is_frame = "File " in line
        is_outside = is_frame and (is_outside or _FORK_FRAMES in line or _START.search(line) is not None)
        if is_frame and any(name in line for name in _OWN_FRAMES):
            while kept and any(name in kept[-1] for name in _RUNPY):
                kept.pop()
        elif not is_outside:
            kept.append(line)
    return kept
