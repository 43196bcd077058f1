"""The user's program inside a worker, cold and warm: run it as `python main.py` or `python -m module` would.

A cold worker is `python <flags> entry.py --muster-worker ...`; in the bundle, the zip replaces `entry.py` and its
`__main__` calls `main`. A warm worker is a fork of the template and calls `run`. Both run the program in a new
`__main__`, from the interpreter's outermost frames. Both let every exception leave through the interpreter itself, so
the effects of `sys.exit`, KeyboardInterrupt, atexit and non-daemon threads are never imitated. A warm worker may skip
the interpreter's own end if nobody could see the difference: `warm/early_end` says when, and what it does instead.

Beyond plain Python, a worker also writes an uncaught exception in torch's error.json format, enables faulthandler, and
writes all threads' stacks to a file on one real-time signal. Some frames cannot be hidden: three frames of this file
lie below the program's own in `inspect.stack()`, and two below those of a `sys.excepthook` that fails itself.

This file runs before the user's `sys.path` is set, and its time is added to every cold start. So it imports only `sys`
and `os` at the top, which every interpreter has already loaded. It is one file of over 400 lines for the same reason: a
cold worker loads it by its path, before parts could be imported from a package.
"""

import os
import sys

TYPE_CHECKING = False  # importing typing takes 10 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, FrameType, ModuleType, TracebackType
    from typing import Any

    from muster.agent.workers.spec import Program, WorkerSpec

muster_frames = True
"""Marks a file of ours, whose frames are omitted from what is shown of a failure."""

WORKER_FLAG = "--muster-worker"
"""The first argument of our own processes; in the bundle, `__main__` passes what follows it to `main`."""

TEMPLATE = "template"
"""Replaces a worker's kind: the process becomes a template."""
STORE = "store"
"""Replaces a worker's kind: the process becomes the store's."""
_FLAGS_WITH_VALUE = "XW"
_LAST_FLAGS = "cm"
_DROPPED_FLAGS = "ixhV?"
"""-i waits for a terminal at the end, and -x skips the first line of *our* file; the others print and exit."""
_WATCHED = "MUSTER_WATCHED"
_STATUS_PAGE = "MUSTER_STATUS_PAGE"
_RUN_FIRST = "MUSTER_RUN_FIRST"
_IMPORT_HOOK = "MUSTER_IMPORT_HOOK"
_EXIT_SUFFIX = ".exit"
"""From `_shared.contract.Env`, which a cold worker has not imported."""
_GROUPS_MODULE = "torch.distributed.distributed_c10d"
_OPTIMIZER_MODULE = "torch.optim.optimizer"
_STORE_MODULE = "torch.distributed.rendezvous"
_OLDEST_TORCH = (2, 4)
"""The oldest torch whose optimizers are counted."""
_RENEWALS: "list[Callable[[], object]]" = []
"""Called when this process becomes a worker of the next round: what the hooks know of the last one."""
_ERROR_FILE = [""]
"""Where an uncaught exception is written; "" means nowhere."""


# -- in the agent -----------------------------------------------------------------------------------------------------


def build_argv(args: "Sequence[str]") -> "list[str]":
    """Build the command line of one of our processes, without the interpreter; `main` gets the words."""
    return [*list_interpreter_flags(sys.orig_argv), find_entry_path(), WORKER_FLAG, *args]


def build_worker_args(spec: "WorkerSpec") -> "list[str]":
    """Build the words for a cold worker: the text fields by name, then kind, target and arguments."""
    named = [f"{name}={text}" for name, text in vars(spec).items() if isinstance(text, str)]
    return [*named, spec.program.kind.value, spec.program.target, *spec.program.args]


def find_entry_path() -> str:
    """Find the file that the interpreter must run: `entry.py` beside this file, or the zip that contains this file."""
    entry = os.path.join(os.path.dirname(os.path.abspath(__file__)), "entry.py")
    if os.path.isfile(entry):
        return entry
    return os.path.abspath(__loader__.archive)  # type: ignore[name-defined, no-any-return]  # a zipimporter


def list_interpreter_flags(orig_argv: "Sequence[str]") -> "list[str]":
    """List the options of the agent's own Python (-X, -W, -E, -I, ...), which its workers get too.

    As with torchrun, `-u` is always among them, so that a killed worker loses no output.

    Args:
        orig_argv: `sys.orig_argv` of the agent.
    """
    flags: list[str] = []
    unbuffered = False
    args = iter(orig_argv[1:])
    for word in args:
        if word == "--check-hash-based-pycs":
            flags += [word, next(args, "default")]
            continue
        if not word.startswith("-") or word.startswith("--") or word == "-":
            break
        options, value, last = _split_options(word)
        options = "".join(option for option in options if option not in _DROPPED_FLAGS)
        if options:
            flags.append(f"-{options}")
            unbuffered = unbuffered or "u" in options
        if value:
            flags += [value] if len(value) > 2 else [value, next(args, "")]
        if last:
            break
    return flags if unbuffered else ["-u", *flags]


def _split_options(word: str) -> "tuple[str, str, bool]":
    """Split `-sEm` into ("sE", "", True), and `-uXdev` into ("u", "-Xdev", False)."""
    for at, option in enumerate(word[1:], start=1):
        if option in _LAST_FLAGS:
            return word[1:at], "", True
        if option in _FLAGS_WITH_VALUE:
            return word[1:at], f"-{word[at:]}", False
    return word[1:], "", False


# -- in the worker ----------------------------------------------------------------------------------------------------


def parse_worker_args(args: "list[str]") -> "WorkerSpec":
    """Read the words of `build_worker_args`: a spec with only its text fields."""
    named = {}
    while "=" in args[0]:
        name, _, text = args[0].partition("=")
        named[name], args = text, args[1:]
    kind, target, *args = args
    namespace: Any = type(sys.implementation)  # without importing its class
    spec: WorkerSpec = namespace(program=namespace(kind=kind, target=target, args=args), **named)
    return spec


def main(argv: "list[str]") -> None:
    """Run as a worker, the template that forks them, or the store. `argv` is what follows `WORKER_FLAG`."""
    interpreter_argv = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv)]
    own_root = _remove_own_folder(sys.argv[0])
    record_code = None
    if argv[0] == STORE:
        _import_own(own_root, "store").serve_cold(int(argv[1]))
    if argv[0] == TEMPLATE:
        serve = _import_own(own_root, "template").serve
        spec, early_end = serve(argv[1:], prepare_main=prepare_main, rename_process=rename_process)
        record_code = early_end.record_code
    else:
        spec = parse_worker_args(argv)
        for name in [name for name in sys.modules if name == "muster" or name.startswith("muster.")]:
            del sys.modules[name]  # the program gets the installed one
    if not os.path.isdir(own_root) or os.path.exists(f"{own_root}/muster/_bundled.py"):
        # The bundle or its unpacked folder.
        sys.path.insert(_choose_place(own_root), own_root)
    run(spec, interpreter_argv, record_code)


def _remove_own_folder(entry: str) -> str:
    """Remove from `sys.path` the entry that the interpreter added for us, and return the package's folder."""
    folder = os.path.dirname(os.path.realpath(entry))
    if sys.path and sys.path[0] in (entry, folder):
        del sys.path[0]
    return folder[: -len("/muster/agent/workers")] if entry.endswith(".py") else entry


def _choose_place(own_root: str) -> int:
    """Return where on `sys.path` `import muster.worker` must find the job's own.

    The place is before an installed muster, or else the end.
    """
    for place, folder in enumerate(sys.path):
        package = os.path.join(folder, "muster")
        if os.path.exists(f"{package}/_shared/contract.py"):
            theirs = _read_version(f"{package}/__init__.py")
            ours = _read_version(f"{own_root}/muster/__init__.py")
            if theirs != ours:
                _say_once(f"`import muster` gives {ours}, which came with the job, not {theirs} of {folder}")
            return place
        if os.path.exists(f"{package}.py") or os.path.exists(f"{package}/__init__.py"):
            _say_once(f"`import muster` gives another package of that name, in {folder}, and not muster.worker")
            break
    return len(sys.path)


def _read_version(path: str) -> str:
    loader, text = globals()["__loader__"], b""
    try:
        if not os.path.exists(path) and hasattr(loader, "archive"):
            text = loader.get_data(path)
        else:
            with open(path, "rb") as file:
                text = file.read()
    except OSError:  # missing or unreadable
        pass
    version: str = text.partition(b'__version__ = "')[2].partition(b'"')[0].decode(errors="replace")
    return version or "an unknown version"


def _say_once(line: str) -> None:
    """Print a line of one worker of the job."""
    if os.environ.get("RANK", "0") == "0" and sys.stderr is not None:
        _call_ignoring_errors(sys.stderr.write, f"muster: {line}\n")


def _import_own(own_root: str, name: str) -> "ModuleType":
    """Import a module of the package `warm`."""
    sys.path.insert(0, own_root)
    try:
        return __import__(f"muster.agent.workers.warm.{name}", fromlist=[name])
    finally:
        sys.path.remove(own_root)


def run(
    spec: "WorkerSpec", interpreter_argv: "list[str]", record_code: "Callable[[int | None], None] | None" = None
) -> None:
    """Run the user's program in this process; its exceptions pass through.

    Args:
        spec: the worker's spec, perhaps only what `parse_worker_args` returns, and never a COMMAND.
        interpreter_argv: the interpreter and its flags, for `sys.orig_argv`.
        record_code: called with the exit code as soon as it is known. None means that only the interpreter can tell.
    """
    program, _ERROR_FILE[0] = spec.program, spec.error_file
    args = [*interpreter_argv, *(["-m"] if program.kind == "module" else []), program.target, *program.args]
    sys.orig_argv[:] = args
    rename_process(args)
    enable_faulthandler(spec.stack_file, spec.crash_file)
    hook_torch()
    before = (os.getpid(), _stat_file(_ERROR_FILE[0]))
    try:
        if first := os.environ.pop(_RUN_FIRST, ""):
            _load_own_file(first)["run"]()
        prepare_main(program)
        _hook_import()
        call, arguments = choose_call(program)
        call(*arguments)
        if record_code is not None:
            record_code(0)
    except SystemExit as stop:
        error_file = _ERROR_FILE[0]
        code = choose_exit_code(stop)
        if record_code is not None:
            record_code(code)
        if code:
            _note_exit_code(code, error_file, before[0])
            _tell_groups_of_failure()
        if error_file and before == (os.getpid(), _stat_file(error_file)):
            if _is_runpy_error(stop.__context__):
                write_error_file(ImportError(str(stop.__context__)), None, error_file)
            elif not (stop.code is None or isinstance(stop.code, int)):  # sys.exit("text")
                write_error_file(stop, find_user_frames(stop.__traceback__), error_file)
            elif spec.crash_file and (refusal := find_refusal(stop)):  # otherwise on stderr, for the agent
                write_error_file(stop, None, error_file, refusal)
        raise
    except BaseException as error:  # recorded and raised, except sys.exit
        error_file = _ERROR_FILE[0]
        shown = find_user_frames(error.__traceback__)
        _limit_traceback(error, shown, record_code)
        if error_file and not isinstance(error, KeyboardInterrupt) and before == (os.getpid(), _stat_file(error_file)):
            write_error_file(error, shown, error_file)
        del shown  # avoids a cycle with the program's frame
        raise


def renew(error_file: str, stack_file: str, crash_file: str) -> None:
    """Become a worker of the next round in the same process. `muster.in_place` calls it, with the variables set.

    The files are those of a `WorkerSpec`.
    """
    _ERROR_FILE[0] = error_file
    enable_faulthandler(stack_file, crash_file)
    for call in _RENEWALS:
        call()


def prepare_main(program: "Program") -> None:
    """Make `sys.argv`, `sys.path[0]` and `sys.modules["__main__"]` what the program expects.

    Source: pymain_run_python in CPython's Modules/main.c.
    """
    kind, target = program.kind, program.target
    sys.argv[:] = ["-m" if kind == "module" else target, *program.args]
    _create_main()
    if kind == "module":
        _insert_first(os.getcwd())
    elif kind == "script" and _is_importable(target):  # with __main__.py
        sys.path.insert(0, _make_absolute(target))
    else:
        _insert_first(os.path.dirname(os.path.realpath(target)))


def choose_call(program: "Program") -> "tuple[Callable[..., None], tuple[object, ...]]":
    """Return the callable that runs the prepared program, and its arguments.

    It leaves as few of our frames as possible.
    """
    kind, target = program.kind, program.target
    if kind == "module":
        return _find_module_runner(), (target, True)
    if kind == "run_path":
        import runpy

        return runpy.run_path, (target, None, "__main__")  # type: ignore[return-value]  # its result is ignored
    if _is_importable(target):
        return _find_module_runner(), ("__main__", False)
    main_module = sys.modules["__main__"]
    return exec, (_load_script(_make_absolute(target), main_module), main_module.__dict__)


def _make_absolute(path: str) -> str:
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)


def _insert_first(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path.insert(0, folder)


def _create_main() -> None:
    """Create a new `__main__` with the attributes that the interpreter gives its own, in the same order."""
    main_module = type(sys)("__main__")
    if sys.version_info < (3, 14):
        main_module.__annotations__ = {}
    main_module.__dict__["__builtins__"] = sys.modules["builtins"]
    main_module.__loader__ = sys.modules["_frozen_importlib"].BuiltinImporter
    sys.modules["__main__"] = main_module


def _is_importable(target: str) -> bool:
    for hook in sys.path_hooks:
        try:
            hook(target)
        except ImportError:
            continue
        return True
    return False


def _find_module_runner() -> "Callable[..., None]":
    """Return what the interpreter itself calls for -m, folders and zips.

    Runpy's public functions leave other frames.
    """
    import runpy

    return runpy._run_module_as_main  # type: ignore[attr-defined, no-any-return]  # noqa: SLF001


def _load_script(path: str, main_module: "ModuleType") -> "CodeType | None":
    """Compile a script file, or load it when it is a .pyc, and complete its `__main__`."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        reason = f"[Errno {error.errno}] {os.strerror(error.errno or 0)}"
        sys.stderr.write(f"{sys.orig_argv[0]}: can't open file {path!r}: {reason}\n")
        raise SystemExit(2) from None
    machinery = sys.modules["_frozen_importlib_external"]
    compiled = path.endswith(".pyc")
    loader = (machinery.SourcelessFileLoader if compiled else machinery.SourceFileLoader)("__main__", path)
    main_module.__file__ = path
    if sys.version_info < (3, 15):
        main_module.__dict__["__cached__"] = None
    main_module.__loader__ = loader
    return loader.get_code("__main__") if compiled else compile(content, path, "exec", dont_inherit=True)


def choose_exit_code(stop: SystemExit) -> "int | None":
    """Return the exit code by the interpreter's rules.

    Return None if the rule differs between its versions or runs user code.
    """
    if type(stop) is not SystemExit:
        return None
    if stop.code is None or isinstance(stop.code, int):
        return None if stop.code is not None and abs(stop.code) >= 1 << 31 else (stop.code or 0) & 0xFF
    return 1 if type(stop.code) in (str, float) else None  # printed by the interpreter


def find_refusal(stop: SystemExit) -> str:
    """Return why a program called `sys.exit(CODE)`; "" if only its stderr says so.

    The reason is the line in which its parser has just refused the arguments (argparse and parsers built on it, click,
    Fire), or the exception that the program handles.
    """
    frames = []
    tb = stop.__traceback__
    while tb is not None:
        frames.append(tb.tb_frame)
        tb = tb.tb_next
    if not frames or not stop.code:
        return ""
    refusal = _find_argparse_message(frames)
    if refusal:
        return refusal
    path, names = frames[-1].f_code.co_filename, frames[-1].f_locals
    report = names.get("report") if "/click/" in path else None  # click 8.5
    context = getattr(report, "__self__", stop.__context__)
    if isinstance(context, SystemExit):
        return find_refusal(context)
    try:
        if hasattr(stop, "trace"):
            return f"ERROR: {stop.trace.elements[-1].ErrorAsStr()}"  # Fire's
        if not isinstance(context, BaseException) or isinstance(context, KeyboardInterrupt):
            return ""
        if hasattr(context, "format_message"):
            return f"Error: {context.format_message()}"  # click's
        is_plain = type(context).__str__ is BaseException.__str__  # the text, of several arguments
        text = context.args[0] if is_plain and context.args else _format_message(context)
        text = "".join(str(text).splitlines()[:1])
    except BaseException:  # noqa: BLE001  # the user's code
        if context is None:
            return ""
        text = ""
    return f"sys.exit while it handled {type(context).__name__}" + (f": {text}" if text else "")


def _find_argparse_message(frames: "list[FrameType]") -> str:
    """Return what an argparse parser refused, even if its `error` is not argparse's, such as jsonargparse's.

    Args:
        frames: down to the one that called `sys.exit`.
    """
    for frame in reversed(frames[-2:]):
        names, name = frame.f_locals, frame.f_code.co_name
        if name in ("exit", "error") and hasattr(names.get("self"), "parse_known_args"):
            message = names.get("message")  # None if the parser has printed it
            if isinstance(message, str):
                message = " ".join(message.split())
                return message if name == "exit" else f"error: {message}"
    return ""


# -- the hook on torch ------------------------------------------------------------------------------------------------


def hook_torch() -> None:
    """Have `hooks.groups` run when the program initialises a process group, `hooks.steps` when an optimizer steps.

    With the agent's store, also see to stores. This is the only place where muster adds to torch. It imports nothing
    from torch.
    """
    hooks: dict[str, Callable[[ModuleType], None]] = {}
    if _WATCHED in os.environ:
        hooks[_GROUPS_MODULE] = _hook_groups
    if _STATUS_PAGE in os.environ:
        hooks[_OPTIMIZER_MODULE] = _hook_optimizers
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        addr, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]  # before the program sets its own
        hooks[_STORE_MODULE] = lambda module: _hook_stores(module, addr, port)
    for name in [name for name in hooks if name in sys.modules]:
        hooks.pop(name)(sys.modules[name])
    if hooks:
        sys.meta_path.insert(0, _HookFinder(hooks))


def _hook_import() -> None:
    """Have `inject` of a module of ours called once the program has imported another one: see `Env.IMPORT_HOOK`."""
    name, _, own = os.environ.pop(_IMPORT_HOOK, "").partition("=")

    def inject(module: "ModuleType") -> None:
        __import__(own, fromlist=("inject",)).inject(module)

    if name in sys.modules:  # by the template
        inject(sys.modules[name])
    elif name:
        sys.meta_path.insert(0, _HookFinder({name: inject}))


class _HookFinder:
    """Waits for the import of modules, calls a function with each, and removes itself after the last."""

    def __init__(self, hooks: "dict[str, Callable[[ModuleType], None]]") -> None:
        self._hooks = hooks

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        hook = self._hooks.pop(name, None)  # first: the search below returns here
        if hook is None:
            return None
        if not self._hooks and self in sys.meta_path:  # perhaps removed by the program
            sys.meta_path.remove(self)
        spec: ModuleSpec | None = sys.modules["_frozen_importlib"]._find_spec(name, path, target)  # noqa: SLF001
        loader = getattr(spec, "loader", None)
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: "ModuleType") -> None:
                del loader.exec_module
                execute(module)
                hook(module)

            loader.exec_module = exec_module
        return spec


def _hook_optimizers(module: "ModuleType") -> None:
    """Count the steps of optimizers in `hooks.steps`, which the first step loads.

    While torch.compile traces a step, nothing is counted: a hook that did more would break its graph, which is an error
    with `fullgraph`.

    Args:
        module: torch.optim.optimizer.
    """
    try:
        register = module.register_optimizer_step_pre_hook, module.register_optimizer_step_post_hook
        is_known = tuple(map(int, module.torch.__version__.split(".")[:2])) >= _OLDEST_TORCH
    except (AttributeError, ValueError):
        return
    if not is_known:
        return
    begun: set[int] = set()
    """Ids of optimizers in their step. A step that calls its base class's is hooked twice and counts once."""
    counter: list[Callable[[object], object]] = []

    def begin(optimizer: object, _args: object, _kwargs: object) -> None:
        if not module.torch.compiler.is_compiling():
            begun.add(id(optimizer))

    def end(optimizer: object, _args: object, _kwargs: object) -> None:
        if not module.torch.compiler.is_compiling() and id(optimizer) in begun:
            begun.discard(id(optimizer))
            if not counter:
                counter.append(_load_step_counter())
            counter[0](optimizer)

    register[0](begin)
    register[1](end)
    _RENEWALS.append(counter.clear)  # the next step finds the page of its round


def _load_step_counter() -> "Callable[[object], object]":
    try:
        return _load_own_file("workers/hooks/steps")["build_step_counter"]()  # type: ignore[no-any-return]
    except Exception:  # noqa: BLE001  # no page, no descriptors left: all goes on
        return id


def _hook_stores(module: "ModuleType", agent_addr: str, agent_port: str) -> None:
    """Have global rank 0 host the stores that are not the agent's, and give each process group keys of its own.

    torch takes any address for that of the agent's store. This store listens at one address only, and keeps the keys of
    a group that was destroyed.

    Args:
        module: torch.distributed.rendezvous.
        agent_addr: the worker's own MASTER_ADDR, whatever the program sets.
        agent_port: the same for MASTER_PORT.
    """
    try:
        create, uses_agent = module._create_c10d_store, module._torchelastic_use_agent_store  # noqa: SLF001
    except AttributeError:  # another torch
        return
    counts: dict[int, int] = {}

    def renew_agent() -> None:
        nonlocal agent_addr, agent_port
        agent_addr, agent_port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        counts.clear()

    _RENEWALS.append(renew_agent)

    def uses_agent_here() -> bool:
        return str(sys._getframe(1).f_locals.get("port")) == agent_port and uses_agent()  # noqa: SLF001

    def create_store(hostname: str, port: int, *args: object, **kwargs: object) -> object:
        store = create(agent_addr if str(port) == agent_port else hostname, port, *args, **kwargs)
        if sys._getframe(2).f_code.co_name == "init_process_group":  # noqa: SLF001
            counts[port] = count = counts.get(port, 0) + 1
            if count > 1:
                return sys.modules["torch.distributed"].PrefixStore(f"init{count}", store)
        return store

    module._torchelastic_use_agent_store = uses_agent_here  # type: ignore[attr-defined]  # noqa: SLF001
    # torch 2.15 asks this. Its own compares the address with the program's MASTER_ADDR.
    module._agent_store_serves = lambda _hostname, port: str(port) == agent_port and uses_agent()  # type: ignore[attr-defined]  # noqa: SLF001
    module._create_c10d_store = create_store  # type: ignore[attr-defined]  # noqa: SLF001


def _hook_groups(module: "ModuleType") -> None:
    """Put a call of `hooks.groups` before the first function that `init_process_group` calls.

    A wrapper around `init_process_group` itself would add a frame to the traceback of its errors.
    """
    name = "set_pytorch_distributed_envs_from_justknobs"
    original = getattr(module, name, None)
    if original is None or getattr(original, _WATCHED, False):
        return
    is_watched = os.environ[_WATCHED] == "1"

    def begin() -> None:
        try:  # noqa: SIM105  # a user's process should import no module for it
            _load_own_file("workers/hooks/groups")["begin_group"](module, is_watched=is_watched)
        except Exception:  # noqa: BLE001, S110  # a torch without the server, no descriptors left: all goes on
            pass
        original()

    setattr(begin, _WATCHED, True)
    setattr(module, name, begin)


def _note_exit_code(code: int, error_file: str, pid: int) -> None:
    """Record the exit code before connections close: peers may fail first, and the agent would end this process.

    Args:
        code: the argument of the program's `sys.exit`.
        error_file: "" if there is none.
        pid: the worker's; a fork of the worker writes nothing.
    """
    if not error_file or os.getpid() != pid:
        return
    try:
        with open(f"{error_file}{_EXIT_SUFFIX}", "w", encoding="ascii") as file:
            file.write(str(code))
    except OSError:
        pass  # shown by the program's end


def _tell_groups_of_failure() -> None:
    """Have `hooks.groups` treat a program that calls `sys.exit` as one that raises, which it sees by itself."""
    groups: Any = getattr(sys.modules.get(_GROUPS_MODULE), "_pg_group_ranks", None)
    if hasattr(groups, "has_failed"):
        groups.has_failed = True


def _load_own_file(name: str) -> "dict[str, Any]":
    """Run a file of the agent by its path, and return its globals: `muster` may be another package here."""
    loader: Any = globals().get("__loader__")
    agent = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if hasattr(loader, "archive"):
        loader = type(loader)(agent)  # finds files below its folder
    else:
        loader = sys.modules["_frozen_importlib_external"].SourceFileLoader(name, f"{agent}/{name}.py")
    module = type(sys)(name)
    exec(loader.get_code(name), module.__dict__)  # noqa: S102  # our own code
    return module.__dict__


# -- faults and exceptions --------------------------------------------------------------------------------------------


def get_stack_signal() -> "int | None":
    """Return the signal that makes a Python worker append its threads' stacks to its stack file.

    Return None on systems without one.
    """
    highest = getattr(sys.modules["_signal"], "SIGRTMAX", None)  # `signal` loads more
    return None if highest is None else int(highest) - 5


def enable_faulthandler(stack_file: str, crash_file: str = "") -> None:
    """Make fatal signals print the Python stack, and the stack signal append it to `stack_file` at any time.

    If the agent does not see this worker's stderr, a crash goes to the stack file, so that the report can show it. If
    the user has set PYTHONFAULTHANDLER to any value, that decision is respected.
    """
    import faulthandler

    is_ours = "PYTHONFAULTHANDLER" not in os.environ
    if is_ours and sys.stderr is not None:
        faulthandler.enable()
    stack_signum = get_stack_signal()
    if not (stack_signum and stack_file):
        return
    try:
        number = _open_stack_file(stack_file)
    except OSError:
        return  # unregistered, so never signalled
    # Even if the disk is full: it may have room later.
    faulthandler.register(stack_signum, number, all_threads=True, chain=False)
    if is_ours and crash_file:
        faulthandler.enable(number)


def _open_stack_file(path: str) -> int:
    """Open the file for appending. A full disk is no failure: the program can do without stacks.

    The agent reports incomplete log files once for all its workers, because its own are on the same disk.
    """
    opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    # A high number leaves the program's files their usual numbers.
    number = min(os.sysconf("SC_OPEN_MAX"), 1024) - 1
    os.dup2(opened, number, inheritable=False)
    _call_ignoring_errors(os.close, opened)  # network file systems report a full disk now
    _call_ignoring_errors(os.write, number, f"--- stacks of process {os.getpid()}\n".encode())
    return number


def _call_ignoring_errors(call: "Callable[..., object]", *args: object, **kwargs: object) -> None:
    """Call a function for output that the program can do without: a full disk or closed stream never ends a worker."""
    try:
        call(*args, **kwargs)
    except (OSError, ValueError):
        return


def _is_runpy_error(error: "BaseException | None") -> bool:
    """Return whether runpy raised the error before it exits with 1: the module is missing or cannot be run."""
    return error is not None and (type(error).__module__, type(error).__name__) == ("runpy", "_Error")


def find_user_frames(tb: "TracebackType | None") -> "TracebackType | None":
    """Return the traceback without our frames at its outer end, which are those of files with our mark."""
    while tb is not None and "muster_frames" in tb.tb_frame.f_globals:
        tb = tb.tb_next
    return tb


def _limit_traceback(
    error: BaseException, shown: "TracebackType | None", record_code: "Callable[[int | None], None] | None"
) -> None:
    """Make the interpreter's report of `error`, through any hook the user set, show only the user's frames.

    The hook must return so that the interpreter ends with 1, or dies of an interrupt.
    """
    hook = getattr(sys, "excepthook", None)

    def show(kind: type[BaseException], value: BaseException, tb: "TracebackType | None") -> None:
        whole = tb
        if value is error:
            tb = sys.last_traceback = error.__traceback__ = shown
        if hook is None:
            del sys.excepthook
            sys.stderr.write("sys.excepthook is missing\n")
            sys.__excepthook__(kind, value, tb)
            return
        sys.excepthook = hook
        _show_at_once(hook, kind, value, tb)
        if shown is None:
            # No line of the program has run. The interpreter still clears the module that was its first `__main__`,
            # whose names now only our frames hold. Source: _PyRun_SimpleFileObject in Python/pythonrun.c.
            sys.last_traceback = whole
        if record_code is not None and value is error and not isinstance(value, KeyboardInterrupt):
            record_code(1)

    sys.excepthook = show


def _show_at_once(
    hook: "Callable[..., object]", kind: "type[BaseException]", value: BaseException, tb: "TracebackType | None"
) -> None:
    """Show a failure in one write if Python's own hook would show it: ranks that fail together share a terminal."""
    import io  # already loaded

    stream = sys.stderr
    if hook is not sys.__excepthook__ or not isinstance(stream, io.TextIOWrapper):
        hook(kind, value, tb)
        return
    before = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
    _call_ignoring_errors(stream.reconfigure, line_buffering=False, write_through=False)
    hook(kind, value, tb)
    _call_ignoring_errors(stream.reconfigure, **before)  # flushes


def _stat_file(path: str) -> "tuple[int, int, int] | None":
    """Return a value that changes when the file is written. What torch's @record wrote has more detail and is kept."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def write_error_file(error: BaseException, shown: "TracebackType | None", error_file: str, reason: str = "") -> None:
    """Write torch's error.json: `{"message": {"message", "extraInfo": {"py_callstack", "timestamp"}}}`.

    With a `reason`, write only that, without exception and traceback.

    Source: torch/distributed/elastic/multiprocessing/errors/error_handler.py.
    """
    error.__traceback__ = shown
    failure = _try_to_write(error, shown, error_file, reason)
    if failure is not None and not isinstance(failure, OSError):
        # A signal handler of the program may raise here. torch's does so when a process of a DataLoader was killed,
        # and the first exception often has the same cause. The second one is part of the message.
        failure = _try_to_write(error, shown, error_file, reason, f"; then {_name_error(failure)}")
    if failure is not None and sys.stderr is not None:
        why = (isinstance(failure, OSError) and failure.strerror) or type(failure).__name__
        _call_ignoring_errors(sys.stderr.write, f"muster: cannot record the exception in {error_file}: {why}\n")


def _try_to_write(
    error: BaseException, shown: "TracebackType | None", error_file: str, reason: str, then: str = ""
) -> "Exception | None":
    path, hiding = sys.path[:], {}
    temporary = f"{error_file}.{os.getpid()}"
    try:
        # Only Python's own modules, for the program may have a json.py.
        library = os.path.dirname(os.__file__)
        sys.path[:] = [folder for folder in path if str(folder).startswith(library)]
        for name in sys.stdlib_module_names & sys.modules.keys():
            if not str(getattr(sys.modules[name], "__file__", None) or library).startswith(library):
                hiding[name] = sys.modules.pop(name)
        import json
        import time
        import traceback

        extra = {
            "py_callstack": "" if reason else "".join(traceback.format_exception(type(error), error, shown)),
            "timestamp": str(int(time.time())),
        }
        data = {"message": {"message": (reason or _name_error(error)) + then, "extraInfo": extra}}
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(data, file)
        os.replace(temporary, error_file)
    # User code (an exception's __str__, __notes__, __cause__) may raise anything, which must not replace the recorded
    # exception.
    except Exception as failure:  # noqa: BLE001
        _call_ignoring_errors(os.unlink, temporary)
        return failure
    finally:
        sys.path[:] = path
        sys.modules.update(hiding)
    return None


def _name_error(error: BaseException) -> str:
    text = _format_message(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _format_message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  # __str__ is user code: it may raise anything
        return "<exception str() failed>"


def rename_process(args: "list[str]") -> None:
    """Make `ps` and `pgrep -f` show these words as the command line, as far as they fit into the real one.

    Source: proc(5), arg_start and arg_end in /proc/<pid>/stat.
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
        start, end = int(fields[45]), int(fields[46])
        text = b"".join(os.fsencode(word) + b"\0" for word in args)[: end - start - 1]
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            memory.write(text.ljust(end - start, b"\0"))
    except OSError:
        return  # unsupported or forbidden: optional
