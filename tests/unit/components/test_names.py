"""Names of jobs and roles are TorchX's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchx.components.dist import get_role_name
from torchx.components.structured_arg import StructuredNameArgument
from torchx.specs.finder import ComponentValidationException

from muster.components.application import parse_names

WORDS = st.text(alphabet="ab-_. 9é", min_size=1, max_size=6)
NAMES = st.one_of(st.text(alphabet="ab/-.", max_size=8), st.text())


@pytest.mark.torchx
@given(name=NAMES, script=st.builds("{}/{}.py".format, WORDS, WORDS))
def test_a_script_names_a_job_as_torchx_does(name: str, script: str) -> None:
    if script.startswith("-"):
        return  # refused by us, see below
    ours = parse_names(name, script=script, module=None)
    theirs = StructuredNameArgument.parse_from(name=name, script=script)
    assert (ours.experiment, ours.run) == (theirs.experiment_name, theirs.run_name)
    assert ours.role == get_role_name(script, None)


@pytest.mark.torchx
@given(name=NAMES, module=st.lists(st.text(alphabet="ab_", min_size=1, max_size=4), min_size=1).map(".".join))
def test_a_module_names_a_job_as_torchx_does(name: str, module: str) -> None:
    ours = parse_names(name, script=None, module=module)
    theirs = StructuredNameArgument.parse_from(name=name, m=module)
    assert (ours.experiment, ours.run) == (theirs.experiment_name, theirs.run_name)
    assert ours.role == get_role_name(None, module)


@pytest.mark.parametrize(
    ("script", "module", "line"),
    [
        (None, None, "give exactly one of --script and -m; neither was given; for example: --script main.py"),
        ("a.py", "b", "give exactly one of --script and -m; both were given: --script 'a.py' and -m 'b'"),
        ("", None, "--script '' is not the path of a file"),
        ("-train.py", None, "--script '-train.py' looks like an option; write ./-train.py if it is a file"),
        (None, "", "-m '' is not the dotted name of a module"),
        (None, "a.", "-m 'a.' is not the dotted name of a module"),
        (None, "-m", "-m '-m' is not the dotted name of a module"),
    ],
)
def test_a_program_that_cannot_be_run_is_refused(script: str | None, module: str | None, line: str) -> None:
    with pytest.raises(ComponentValidationException) as caught:
        parse_names("/", script=script, module=module)
    assert isinstance(caught.value, ValueError)
    assert str(caught.value).startswith(line)
