"""torchrun's module: the namespace is torchrun's, and becomes the agent's command line."""

import argparse
import subprocess
import sys

import pytest

from muster import launch, run
from muster.agent.cli.arguments import parse_args

MODULES_OF_TORCHRUNS = {"torch", "metadata", "uuid", "macros", "logger", "env", "check_env", "get_logger"}
"""Names that its own code needs."""


@pytest.mark.torch
def test_the_namespace_has_torchruns_names_types_and_defaults() -> None:
    from torch.distributed.run import get_args_parser

    words = ["train.py", "--lr", "1"]
    theirs, ours = vars(get_args_parser().parse_args(words)), vars(run.parse_args(words))
    assert {name: ours.get(name, "missing") for name in theirs} == theirs
    assert {name: type(ours[name]) for name in theirs} == {name: type(value) for name, value in theirs.items()}


@pytest.mark.torch
@pytest.mark.parametrize("line", ["--nnodes 1:4 --nproc_per_node=gpu -r 3 --tee=0:1 -m train", "--run-path x.py -- a"])
def test_values_are_torchruns(line: str) -> None:
    from torch.distributed.run import get_args_parser

    theirs, ours = vars(get_args_parser().parse_args(line.split())), vars(run.parse_args(line.split()))
    assert {name: ours[name] for name in theirs} == {
        **theirs,
        **{k: bool(v) for k, v in theirs.items() if v in (0, 1) and isinstance(ours[k], bool)},
    }


def test_variables_are_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    monkeypatch.setenv("PET_STANDALONE", "1")
    monkeypatch.setenv("PET_DUPLICATE_STDOUT_FILTERS", "a,b,,c")
    args = run.parse_args(["train.py"])
    assert (args.max_restarts, args.standalone, args.duplicate_stdout_filters) == (3, True, ["a", "b,c"])


def test_nnodes() -> None:
    assert run.parse_min_max_nnodes("2") == (2, 2)
    assert run.parse_min_max_nnodes("1:4") == (1, 4)
    with pytest.raises(RuntimeError, match="nnodes=1:2:3 is not in"):
        run.parse_min_max_nnodes("1:2:3")


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("--nproc-per-node 2 train.py", "--nproc-per-node=2 train.py"),
        ("-m pkg.train --lr 1", "--module pkg.train --lr 1"),
        ("--rdzv-backend c10d --rdzv-endpoint h:1 --node-rank 0 t.py", "--rdzv-backend=c10d --rdzv-endpoint=h:1 t.py"),
        ("--nnodes 2 --node-rank 1 --master-addr h --master-port 1 t.py", "--node-rank=1 --master-addr=h"),
        ("--standalone --duplicate-stdout-filters a,b,,c t.py", "--standalone --duplicate-stdout-filters=a,b,,c"),
        ("t.py -- -- a", "t.py -- -- a"),
    ],
)
def test_the_agent_gets_the_same_meaning(line: str, wanted: str) -> None:
    words = run.build_flags(run.parse_args(line.split()))
    assert [word for word in wanted.split() if word not in words] == []
    direct, by_way_of_run = parse_args(line.split(), {}), parse_args(words, {})
    assert by_way_of_run.program == direct.program
    assert (by_way_of_run.nproc, by_way_of_run.logs, by_way_of_run.role) == (direct.nproc, direct.logs, direct.role)
    ours, theirs = by_way_of_run.rendezvous, direct.rendezvous
    assert (ours.backend, ours.standalone, ours.host, ours.port) == (
        theirs.backend,
        theirs.standalone,
        theirs.host,
        theirs.port,
    )


def test_an_empty_role_is_a_role() -> None:
    """TorchX's components give it: lines begin with `[0]:`."""
    assert parse_args(run.build_flags(run.parse_args(["--role", "", "t.py"])), {}).role == ""


@pytest.mark.torch
def test_names_that_programs_import_from_torchruns_module() -> None:
    import torch.distributed.run as theirs

    names = {name for name in vars(theirs) if not name.startswith("_")} - MODULES_OF_TORCHRUNS
    assert [name for name in sorted(names) if not hasattr(run, name)] == []


def test_use_env_off_passes_the_local_rank() -> None:
    args = run.parse_args(["train.py", "a"])
    args.use_env = False
    assert run.build_flags(args)[-3:] == ["train.py", "--local-rank=${local_rank}", "a"]


@pytest.mark.parametrize(("flags", "wanted"), [("", ["--local-rank=${local_rank}"]), ("--use_env", [])])
def test_launch_passes_the_local_rank_unless_told_otherwise(flags, wanted, monkeypatch) -> None:
    given: list[argparse.Namespace] = []
    monkeypatch.setattr(run, "run", given.append)
    with pytest.warns(FutureWarning, match="torch.distributed.launch, which is deprecated"):
        launch.main([*flags.split(), "--nproc-per-node", "2", "train.py", "a"])
    words = run.build_flags(given[0])
    assert words[words.index("train.py") :] == ["train.py", *wanted, "a"]
    assert not any("use" in word for word in words)


def test_launch_of_a_command_needs_use_env() -> None:
    with pytest.raises(ValueError, match=r"'--no-python' flag, .* '--use-env' flag"):
        launch.launch(launch.parse_args(["--no-python", "echo"]))


@pytest.mark.torch
def test_launch_has_the_flags_of_torchs() -> None:
    import torch.distributed.launch as theirs

    for words in (["--use-env", "-m", "t", "a"], ["--nproc_per_node=2", "--master-port", "29501", "t.py", "--x"]):
        ours, torchs = vars(launch.parse_args(words)), vars(theirs.parse_args(words))
        assert {name: ours.get(name) for name in torchs} == torchs


@pytest.mark.torch
def test_run_path_is_a_function_in_the_command_of_config_from_args() -> None:
    command = run.config_from_args(run.parse_args(["--run-path", "t.py", "a"]))[1:]
    assert command == (run.run_script_path, ["t.py", "a"])


@pytest.mark.torch
def test_config_from_args_is_torchs_but_for_the_class() -> None:
    import torch.distributed.run as theirs

    words = [
        "--nproc-per-node",
        "1",
        "--nnodes",
        "2",
        "--node-rank",
        "1",
        "--tee",
        "3",
        "--local-ranks-filter",
        "0",
        "-m",
        "t",
        "a",
    ]
    our_config, *our_command = run.config_from_args(run.parse_args(words))
    args = theirs.parse_args(words)
    args.master_port = 29500  # as its `run` does before
    their_config, *their_command = theirs.config_from_args(args)
    assert our_command == their_command
    ours = {name: value for name, value in vars(our_config).items() if name in vars(their_config)}
    for name in ("logs_specs",):
        mine, yours = ours.pop(name), vars(their_config).pop(name)
        assert (mine._redirects, mine._tee, mine._local_ranks_filter) == (
            yours._redirects,
            yours._tee,
            yours._local_ranks_filter,
        )
    assert ours == {name: value for name, value in vars(their_config).items() if name in ours}


def test_nothing_imports_torch_early() -> None:
    code = "import sys, muster.elastic, muster.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
