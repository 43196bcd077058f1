"""Which way imports point: between the rooms of the package, and inside the agent and the adapters.

Read from the source, so that an import inside a function counts too, and one that only type checkers read.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

import pytest

import muster
import muster.elastic
from muster.schedulers import adapter
from muster_entry import SCHEDULERS

PACKAGE = Path(muster.__file__).parent
ROOMS = ("agent", "components", "elastic", "schedulers")
START_THE_AGENT = {"elastic": ("agent",), "run.py": ("agent", "elastic"), "launch.py": ("agent",)}
"""The Python API: it uses the agent's flags, configuration and reports, and starts the agent as a process."""
LENDS = ("muster.schedulers.held.holds.", "muster.schedulers.errors.")
"""`elastic` runs on a hold."""
PURE_OF_NODE = ("actions", "decisions", "drain_decisions", "events", "worker_decisions")
LAZY = {"docker", "kubernetes", "torch", "urllib3"}


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported module, and where."""

    path: str
    line: int
    module: str
    at_import: bool
    """Runs when the importing module is imported."""
    for_types: bool
    """Only type checkers read it."""

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    @property
    def place(self) -> str:
        """The room, `_shared`, or what lies beside them ("")."""
        first, slash, _ = self.path.partition("/")
        return first if slash else ""

    def __str__(self) -> str:
        return f"muster/{self.path}:{self.line} imports {self.module}"


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imported_modules(node: ast.AST, path: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    package = ["muster", *path.split("/")[:-1]]
    base = ".".join(package[: len(package) - node.level + 1]) + "." if node.level else ""
    origin = (base + (node.module or "")).strip(".")
    # `from muster import agent` names a module in its second half
    return [f"{origin}.{alias.name}" for alias in node.names]


def walk(node: ast.AST, path: str, at_import: bool, for_types: bool = False) -> Iterator[Import]:
    for module in imported_modules(node, path):
        line: int = node.lineno  # type: ignore[attr-defined]
        yield Import(path=path, line=line, module=module, at_import=at_import, for_types=for_types)
    for_types = for_types or is_type_checking(node)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or for_types:
        at_import = False
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):  # no import is inside one
            yield from walk(child, path, at_import, for_types)


def all_imports() -> list[Import]:
    found: list[Import] = []
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(PACKAGE).as_posix()
        found += walk(ast.parse(file.read_text(), str(file)), path, at_import=True)
    return found


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return all_imports()


TORCH_HANDLERS = "agent/rendezvous/torch_handlers/"
FOR_TORCH = (TORCH_HANDLERS, "agent/logs/torch_logs_specs.py")
"""The agent's modules that wrap what torch has, called torch_*; other programs do not load them."""


def offenders(wrong: Iterator[Import]) -> list[str]:
    return [str(found) for found in wrong]


def test_the_scan_sees_imports_at_all(imports: list[Import]) -> None:
    assert any(found.module == "muster._shared.contract.AGENT_MODULE" for found in imports)
    assert {found.place for found in imports} >= {"agent", "components"}


def test_no_room_imports_another(imports: list[Import]) -> None:
    def crosses(found: Import) -> bool:
        if found.place == "cli" and found.module.startswith(("muster.schedulers.", "muster.components.help_text.")):
            return False  # the commands for people know the adapters' public operations, and print a component's help
        if found.place == "testing" and found.module.startswith("muster.schedulers."):
            return False  # see below
        target = found.module.split(".")[1:2]
        allowed = START_THE_AGENT.get(found.place or found.path, ())
        if found.path == "elastic/jobs/held.py" and found.module.startswith(LENDS):
            return False
        return found.top == "muster" and target[0] in ROOMS and target[0] not in (found.place, *allowed)

    assert offenders(found for found in imports if found.module != "muster" and crosses(found)) == []


def test_what_declares_a_schedulers_properties_imports_neither_torchx_nor_a_client(imports: list[Import]) -> None:
    """`muster list` reads them of all schedulers."""
    paths = {f"{target.partition(':')[0].replace('.', '/')}/__init__.py" for target in SCHEDULERS.values()}
    found = [each for each in imports if f"muster/{each.path}" in paths and each.at_import]
    assert {each.path for each in found} == {path.removeprefix("muster/") for path in paths}
    allowed = ("muster.schedulers.adapter.properties.", "muster._shared.processes.")
    light = (each for each in found if each.top not in sys.stdlib_module_names)
    assert offenders(each for each in light if not each.module.startswith(allowed)) == []


def test_the_contract_of_adapters_knows_the_seam_only(imports: list[Import]) -> None:
    ours = [found for found in imports if found.place == "testing" and found.top == "muster"]
    assert ours
    names = {f"muster.schedulers.adapter.{name}" for name in adapter.__all__}
    assert offenders(found for found in ours if found.module not in names and ".testing." not in found.module) == []


def test_the_agent_and_the_shared_modules_are_standard_library_only(imports: list[Import]) -> None:
    allowed = set(sys.stdlib_module_names) | {"muster"}

    def torch_is_allowed(found: Import) -> bool:
        in_workers = ("agent/workers/", "agent/features/preflight/measure.py", "data.py", *FOR_TORCH)
        return found.top == "torch" and found.path.startswith(in_workers)

    def is_for_types(found: Import) -> bool:
        """Under TYPE_CHECKING: never run."""
        return found.top in ("typing_extensions", "_typeshed") and not found.at_import

    places = {"agent", "_shared", ""}
    ours = (found for found in imports if found.place in places and found.path != "run.py")
    foreign = (found for found in ours if found.top not in allowed)
    assert offenders(found for found in foreign if not torch_is_allowed(found) and not is_for_types(found)) == []


def test_what_the_rooms_share_imports_no_room(imports: list[Import]) -> None:
    ours = (found for found in imports if found.place == "_shared" and found.top == "muster")
    assert offenders(found for found in ours if not found.module.startswith("muster._shared.")) == []


def test_worker_imports_the_contract_and_when_it_is_called_what_a_call_needs(imports: list[Import]) -> None:
    paths = ("worker.py", "in_place.py", "_shared/debugger.py")
    own = [found for found in imports if found.path in paths and found.top == "muster"]
    later = ("muster._shared.debugger", "muster.in_place")
    allowed = ("muster._shared.contract", "muster._shared.layouts", *later)
    assert offenders(found for found in own if not found.module.startswith(allowed)) == []
    assert not any(found.module in later and found.at_import for found in own)


def test_callbacks_know_what_scripts_import_and_their_own_trainer(imports: list[Import]) -> None:
    """Nothing else imports them, because most programs have no such trainer."""
    allowed = set(sys.stdlib_module_names) | {"numpy", "torch"}
    trainers = {"integrations/huggingface.py": "transformers", "integrations/lightning.py": "lightning"}
    own = [found for found in imports if found.place == "integrations"]
    assert {found.path for found in own} == set(trainers)
    foreign = (found for found in own if found.top not in {*allowed, trainers[found.path]})
    assert offenders(found for found in foreign if found.module not in ("muster.snapshots", "muster.worker")) == []
    assert offenders(found for found in imports if found.module.startswith("muster.integrations")) == []


def test_the_python_api_knows_only_the_agents_data(imports: list[Import]) -> None:
    data = ("cli.", "config.", "diagnosis.", "driven.", "errors.", "hold.facts.", "placement.device_count.")
    data += ("runtime.event_log.", "runtime.ports.")
    data += ("rendezvous.protocol.", "rendezvous.transport.stream.")  # programs of several nodes exchange results
    data += ("rendezvous.torch_handlers.thread.", "rendezvous.torch_handlers.messages.")  # for handlers of the caller
    allowed = tuple(f"muster.agent.{name}" for name in data)
    program = {"muster.agent.__main__.main"}  # `python -m muster.run` is the agent
    api = (found for found in imports if found.place == "elastic" or found.path in ("run.py", "launch.py"))
    used = (found for found in api if found.module.startswith("muster.agent") and found.module not in program)
    forked = (
        "runtime.records.",
        "workers.program.",
        "workers.spec.",
        "workers.stall_watch.",
        "workers.warm.forking.",
        "workers.warm.forked_worker.",
    )

    def is_for_forks(found: Import) -> bool:
        """There the program itself is the template and the workers."""
        words = f"{found.module}."
        return found.path.startswith("elastic/fork/") and words.startswith(tuple(f"muster.agent.{n}" for n in forked))

    assert offenders(found for found in used if not found.module.startswith(allowed) and not is_for_forks(found)) == []


def test_the_python_api_imports_torch_only_when_a_class_of_torch_is_needed(imports: list[Import]) -> None:
    lazy = {f"elastic/{name.rpartition('.')[2]}.py" for name in muster.elastic._LAZY.values() if "muster" in name}
    api = (found for found in imports if found.place == "elastic" or found.path in ("run.py", "launch.py"))
    assert (
        offenders(found for found in api if found.top == "torch" and found.at_import and found.path not in lazy) == []
    )


def test_components_know_torchx_and_nothing_heavier(imports: list[Import]) -> None:
    allowed = set(sys.stdlib_module_names) | {"muster", "torchx"}
    assert offenders(found for found in imports if found.place == "components" and found.top not in allowed) == []


def test_client_libraries_are_imported_when_first_needed(imports: list[Import]) -> None:
    assert offenders(found for found in imports if found.place == "schedulers" and found.top == "torch") == []
    eager = (found for found in imports if found.at_import and found.top in LAZY and found.place == "schedulers")
    assert offenders(eager) == []


def test_the_agents_ordinary_path_imports_no_asyncio_and_no_torch(imports: list[Import]) -> None:
    def is_heavy(found: Import) -> bool:
        names_wrapper = any(word.startswith("torch_") for word in found.module.split(".")) and found.top == "muster"
        return names_wrapper or found.top in {"asyncio", "torch", "numpy"}

    ours = (found for found in imports if found.place in {"agent", "_shared", ""})
    ordinary = (found for found in ours if not found.path.startswith(FOR_TORCH))
    assert offenders(found for found in ordinary if found.at_import and is_heavy(found)) == []


def test_only_the_selection_of_a_backend_knows_torchs_handlers(imports: list[Import]) -> None:
    """The other end of a caller's handler does, too: it is in the program that starts the agent."""
    package = "muster." + TORCH_HANDLERS.replace("/", ".")
    known = [found for found in imports if f"{found.module}.".startswith(package)]
    outside = {found.path for found in known if not found.path.startswith(TORCH_HANDLERS)}
    assert outside == {"agent/rendezvous/selection.py", "elastic/rendezvous.py"}


# -- inside the agent and the adapters --------------------------------------------------------------------------------

WITHOUT_EFFECT = {"bisect", "collections", "dataclasses", "enum", "functools", "itertools", "json", "math", "re"}
WITHOUT_EFFECT |= {"signal", "string", "typing", "zlib"}
"""What a pure module may import besides muster: nothing that reads a clock, a file or a socket."""


def name_module(path: str) -> str:
    return "muster." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = frozenset(name_module(file.relative_to(PACKAGE).as_posix()) for file in PACKAGE.rglob("*.py")) | {"muster"}
PACKAGES = frozenset(name_module(file.relative_to(PACKAGE).as_posix()) for file in PACKAGE.rglob("__init__.py"))


def find_module(name: str) -> str:
    """The module of ours that this name is, or is a part of."""
    while name not in MODULES and "." in name:
        name = name.rpartition(".")[0]
    return name


def build_arrows(imports: list[Import]) -> dict[str, set[str]]:
    """Per module of ours, the modules of ours that it imports at any time, or for its types."""
    arrows: dict[str, set[str]] = {module: set() for module in MODULES}
    for found in imports:
        target = find_module(found.module)
        if target in MODULES and target != name_module(found.path):
            arrows[name_module(found.path)].add(target)
    return arrows


def find_cycle(arrows: Mapping[str, AbstractSet[str]]) -> list[str]:
    """One way that leads back to where it began; empty when there is none."""
    done: set[str] = set()

    def follow(module: str, way: list[str]) -> list[str]:
        if module in way:
            return [*way[way.index(module) :], module]
        if module in done:
            return []
        for target in sorted(arrows.get(module, ())):
            if cycle := follow(target, [*way, module]):
                return cycle
        done.add(module)
        return []

    return next((cycle for module in sorted(arrows) if (cycle := follow(module, []))), [])


def test_the_search_for_cycles_finds_one() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}}) == []


STILL_CYCLIC = {
    ("muster.agent.rendezvous.interface", "muster.agent.rendezvous.report_messages"): "only a failure loads the report"
}
"""Imports for types only that close a cycle, with the reason."""


@pytest.mark.parametrize("where", ["at the top", "in a function", "for types"])
def test_every_import_counts_for_a_cycle(where: str) -> None:
    way = Import(path="worker.py", line=1, module="muster.run.main", at_import=True, for_types=False)
    is_typed = where == "for types"
    at_import = where == "at the top"
    back = Import(path="run.py", line=1, module="muster.worker.step", at_import=at_import, for_types=is_typed)
    assert find_cycle(build_arrows([way, back])) == ["muster.run", "muster.worker", "muster.run"]


def test_no_module_imports_itself_by_a_detour(imports: list[Import]) -> None:
    arrows = build_arrows(imports)
    for source, target in STILL_CYCLIC:
        assert find_cycle({source: {target}, target: arrows[target]}), f"{source} is not in a cycle any more"
        arrows[source].discard(target)
    assert find_cycle(arrows) == []


FEATURES = "muster.agent.features."


def find_feature(module: str) -> str:
    """The folder of a feature that a module is in; "": none."""
    name = module.removeprefix(FEATURES).partition(".")[0]
    return name if module.startswith(FEATURES) and f"{FEATURES}{name}" in PACKAGES else ""


def test_no_package_imports_a_neighbour_that_imports_it(imports: list[Import]) -> None:
    """Nothing imports a feature, so no cycle leads through one. Their seam names types of all of the agent."""
    arrows: dict[str, set[str]] = {}
    counted = (found for found in imports if not (found.path.startswith("agent/features/") and found.for_types))
    for module, targets in build_arrows(list(counted)).items():
        if find_feature(module):
            continue
        for target in targets:
            ours, theirs = module.split("."), target.split(".")
            shared = next(i for i, (a, b) in enumerate(zip([*ours, ""], [*theirs, ""], strict=False)) if a != b)
            source, destination = ".".join(ours[: shared + 1]), ".".join(theirs[: shared + 1])
            if {source, destination} <= PACKAGES and len(theirs) > shared and len(ours) > shared:
                arrows.setdefault(source, set()).add(destination)
    assert find_cycle(arrows) == []


def read_outside_names(package: str) -> set[str] | None:
    """What a package's docstring offers to other packages, in the paragraph that begins with "From outside".

    Returns:
        Names of its modules and packages, and of what it has itself; None: any module.
    """
    path = PACKAGE / package.replace(".", "/").removeprefix("muster/") / "__init__.py"
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraphs = [paragraph for paragraph in docstring.split("\n\n") if paragraph.startswith("From outside, import")]
    assert len(paragraphs) == 1, f"{package} does not say what may be imported from outside"
    if "any module" in paragraphs[0]:
        return None
    names = re.findall(r"`([\w.]+)`", paragraphs[0])
    found = {find_module(f"{package}.{name}").removeprefix(f"{package}.") for name in names}
    return {name for name in (found | set(names)) if name != package}


def list_from_outside(imports: list[Import], package: str) -> Iterator[tuple[Import, str]]:
    """Imports of a package's content by modules outside of it, each with the name as the package's docstring has it."""
    for found in imports:
        is_inside = f"{name_module(found.path)}.".startswith(f"{package}.")
        if not is_inside and found.module.startswith(f"{package}."):
            target = find_module(found.module)
            yield found, (found.module if target == package else target).removeprefix(f"{package}.")


OF_THE_AGENT = sorted(name for name in PACKAGES if name.startswith("muster.agent.") and not name.startswith(FEATURES))


def test_nothing_imports_a_feature_but_itself(imports: list[Import]) -> None:
    """Then its folder can be deleted. What loads features does so by their names in the table."""
    ways = ((found, find_feature(found.module), find_feature(name_module(found.path))) for found in imports)
    assert offenders(found for found, feature, own in ways if feature and feature != own) == []


@pytest.mark.parametrize("package", OF_THE_AGENT)
def test_no_import_goes_past_what_a_package_offers(imports: list[Import], package: str) -> None:
    offered = read_outside_names(package)
    outside = list(list_from_outside(imports, package))
    past = (
        found
        for found, name in outside
        if offered is not None and not any(f"{name}.".startswith(f"{each}.") for each in offered)
    )
    assert offenders(past) == []


@pytest.mark.parametrize("package", OF_THE_AGENT)
def test_what_a_package_offers_is_used(imports: list[Import], package: str) -> None:
    """So that the sentence stays true. A name in it that is no module's is of another package."""
    offered = read_outside_names(package) or set()
    used = [name for _found, name in list_from_outside(imports, package)]
    of_package = {each for each in offered if f"{package}.{each}" in MODULES}
    assert [each for each in sorted(of_package) if not any(f"{name}.".startswith(f"{each}.") for name in used)] == []


def test_the_runtime_knows_nothing_of_the_agent(imports: list[Import]) -> None:
    runtime = (found for found in imports if found.path.startswith("agent/runtime/") and found.top == "muster")
    inside = ("muster.agent.runtime.", "muster._shared.")
    assert offenders(found for found in runtime if not found.module.startswith(inside)) == []


def test_pure_decisions_import_nothing_that_acts(imports: list[Import]) -> None:
    pure = (
        "agent/rendezvous/consensus/",
        "agent/rendezvous/drain_ceiling.py",
        "agent/features/snapshots/leader.py",
        *(f"agent/features/hangs/{name}.py" for name in ("judge", "collectives", "nccl_launches")),
        "agent/features/preflight/leader.py",
        "agent/rendezvous/round_messages.py",
        "agent/rendezvous/verdicts.py",
        "agent/rendezvous/restarts.py",
        "agent/rendezvous/faulty_nodes.py",
        *(
            f"agent/node/{name}.py"
            for name in ("decisions", "worker_decisions", "drain_decisions", "request_decisions", "events", "actions")
        ),
        *(f"agent/rendezvous/member/{name}.py" for name in ("decisions", "seeking", "rounds", "events", "state")),
    )
    allowed = (
        "muster.agent.rendezvous.consensus.",
        "muster.agent.rendezvous.drain_ceiling.",
        "muster.agent.features.",
        "muster.agent.rendezvous.verdicts.",
        "muster.agent.rendezvous.restarts.",
        "muster.agent.rendezvous.faulty_nodes.",
        "muster._shared.causes.",
        "muster._shared.policy.",
        "muster.agent.rendezvous.interface.",
        "muster.agent.rendezvous.report_messages.",
        "muster.agent.node.",
        "muster.agent.diagnosis.",
        "muster._shared.fields.",
        "muster.agent.runtime.limits.",  # constants
        "muster.agent.runtime.persistent.",
        "muster._shared.records.",
        "muster._shared.reports.",
        "muster._shared.transitions.",
        "muster.agent.round.",
        "muster.agent.config.",
        *(f"muster.agent.rendezvous.member.{name}" for name in ("seeking", "rounds", "events", "state")),
        "muster.agent.rendezvous.protocol.",  # records
        "muster.agent.rendezvous.transport.links.",  # why a link has ended
        "muster._shared.codec.",
        "muster._shared.preflight.",  # its records, and the table
        "muster.agent.features.preflight.leader.",
        "muster.agent.rendezvous.round_messages.",
    )

    def acts(found: Import) -> bool:
        if found.top == "muster":
            return not found.module.startswith((*allowed, "muster._shared.contract.", "muster._shared.layouts."))
        return found.top not in WITHOUT_EFFECT

    files = [found for found in imports if found.path.startswith(pure)]
    assert len({found.path for found in files}) > 10
    assert offenders(found for found in files if acts(found)) == []


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("__init__.py")), ids=lambda path: path.parent.name)
def test_every_package_says_what_it_holds(path: Path) -> None:
    text = path.read_text()
    said = text if path.parent.name == "commands" else ast.get_docstring(ast.parse(text)) or ""  # it has a table
    modules = [module.stem for module in path.parent.glob("*.py") if not module.stem.startswith("__")]
    missing = [module for module in modules if not re.search(rf"(`|    |\"){module}\b", said)]
    if path.parent != PACKAGE:
        assert missing == []


def test_nothing_waits_with_select() -> None:
    """It takes no descriptor above 1,023: `processes.wait_events` waits."""
    wrong = [file for file in PACKAGE.rglob("*.py") if re.search(r"select\.select\(", file.read_text())]
    assert wrong == []
