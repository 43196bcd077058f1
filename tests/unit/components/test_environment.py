"""Variables from files and from the caller's environment, whose values stand in no command line."""

import os
import sys

import pytest
from torchx.specs.builders import materialize_appdef
from torchx.specs.finder import ComponentValidationException

from muster._shared.contract import RoleKey
from muster.components import dist
from muster.components.environment import parse_env

SECRET = "hunter2-abc"
ENVIRON = {"HF_TOKEN": SECRET, "DB": "a=b,c;d $$e ${app_id}", "EMPTY": ""}


def values_of(env=None, file=None, environ=ENVIRON):
    """As a role's processes get them: TorchX turns `$$` into `$`."""
    given = parse_env(env, file, environ)
    return {name: value.replace("$$", "$") if name in given.taken else value for name, value in given.values.items()}


@pytest.fixture
def env_file(tmp_path):
    def write(content, mode=0o600):
        path = tmp_path / "job.env"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        path.chmod(mode)
        return str(path)

    return write


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", {}),
        ("HF_TOKEN", {"HF_TOKEN": SECRET}),
        ("HF_TOKEN, DB", {"HF_TOKEN": SECRET, "DB": ENVIRON["DB"]}),
        ("HF_TOKEN;EMPTY,LR=0.1", {"HF_TOKEN": SECRET, "EMPTY": "", "LR": "0.1"}),
        ("LR=0.1,B=2", {"LR": "0.1", "B": "2"}),
        ("LR=0.1,HF_TOKEN", {"LR": "0.1,HF_TOKEN"}),  # TorchX's lists
        ("LR=0.1,HF_TOKEN,B=2", {"LR": "0.1,HF_TOKEN", "B": "2"}),
        ("HF_TOKEN,HF_TOKEN=other", {"HF_TOKEN": "other"}),
    ],
)
def test_names_come_before_pairs(text, values):
    assert values_of(text) == values


def test_a_mapping_is_what_it_was():
    given = parse_env({"A": "p$q ${app_id}"}, None, {})
    assert (given.values, given.taken) == ({"A": "p$q ${app_id}"}, ())
    assert parse_env(None, None, ENVIRON).values == {}


def test_files_follow_dockers_rules(env_file):
    path = env_file(
        b"\xef\xbb\xbf# a comment\n\n  A=1\nB=\" quoted \" # no comment\r\nHF_TOKEN\n\t\nC==x\nD=\nA=2\nE=a b  \nF='$x'"
    )
    assert values_of(None, path) == {
        "A": "2", "B": '" quoted " # no comment', "HF_TOKEN": SECRET, "C": "=x", "D": "", "E": "a b  ", "F": "'$x'"
    }  # fmt: skip
    assert values_of({"A": "3"}, path)["A"] == "3"
    assert values_of("A=3", path)["A"] == "3"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("NOT_SET", "line 1: your environment has no variable NOT_SET; export it, or write NOT_SET=VALUE"),
        (f"A=1\n={SECRET}", "line 2: there is no name before '=', or one with a space, comma or $"),
        (f"export B={SECRET}", "line 1: there is no name before '=', or one"),
        (f"A=1\n{SECRET} {SECRET}", "line 2: it is neither NAME=VALUE nor NAME; a value is one line"),
        (b"A=1\nB=\xff\n", "line 2: is not UTF-8 text"),
        (b"A=a\0b", "line 1: the value of A has a NUL character"),
    ],
)
def test_a_wrong_line_is_one_clear_line_without_what_may_be_secret(env_file, content, problem):
    path = env_file(content)
    with pytest.raises(ComponentValidationException) as caught:
        dist.ddp(script="main.py", env_file=path)
    assert str(caught.value).startswith(f"--env_file {path}, {problem}")
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"env_file": "/no/such"}, "--env_file /no/such: No such file or directory; give a file of lines NAME=VALUE"),
        ({"env_file": "/"}, "--env_file /: Is a directory; give a file"),
        ({"env": "NOT_SET"}, "--env NOT_SET: your environment has no variable NOT_SET; export it, or write NOT_SET="),
        ({"env": "NOT_SET,LR=1"}, "--env NOT_SET: your environment has no variable NOT_SET"),
        ({"env": "A B"}, "--env: 'A B' is not the name of a variable; allowed are NAME and NAME=VALUE"),
        ({"env": "HOME,,LR=1"}, "--env: the name of a variable is missing"),
        *(
            ({"env": env}, "--env: cannot be read as NAME=VALUE,NAME=VALUE; a value that is empty or has '=' needs")
            for env in ("A=", "A=,B=1", f"URL=https://x/?a={SECRET}", f"A=1,{SECRET.lower()}=-Da=b")
        ),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments, line):
    with pytest.raises(ComponentValidationException) as caught:
        dist.ddp(script="main.py", **arguments)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o604, 0o620, 0o611])
def test_a_file_that_others_may_read_is_warned_of(env_file, caplog, mode):
    path = env_file("A=1", mode)
    assert values_of(None, path) == {"A": "1"}
    line = f"--env_file {path}: other users may read it (mode {mode:o}); chmod 600 it"
    assert caplog.messages == ([line] if mode & 0o44 else [])


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/fd is Linux's")
def test_a_pipe_can_be_the_file():
    reader, writer = os.pipe()
    os.write(writer, b"A=1\n")
    os.close(writer)
    assert values_of(None, f"/dev/fd/{reader}") == {"A": "1"}
    os.close(reader)


@pytest.mark.torchx
@pytest.mark.parametrize("component", [dist.ddp, dist.spmd, dist.torchrun])
def test_components_take_both_from_a_command_line_and_from_python(component, env_file, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("DB", ENVIRON["DB"])
    path = env_file("PLAIN=pa$$word\nDB\n")
    line = ["--script", "main.py", "--env", "HF_TOKEN,LR=0.1", "--env_file", path]
    for app in (materialize_appdef(component, line), component(script="main.py", env="HF_TOKEN,LR=0.1", env_file=path)):
        [role] = app.roles
        assert role.env["HF_TOKEN"] == SECRET
        assert role.env["LR"] == "0.1"
        assert role.env["PLAIN"] == "pa$$$$word"
        assert role.metadata[RoleKey.SECRET_ENV] == "DB,HF_TOKEN,PLAIN"
        assert SECRET not in " ".join(role.args)
    app = materialize_appdef(component, ["--script", "main.py"], {"env": "HF_TOKEN", "env_file": path})  # .torchxconfig
    assert app.roles[0].env["HF_TOKEN"] == SECRET
