"""Single lines of `.torchxignore`; `tests/process/schedulers/test_ignore_rules_of_git.py` compares with git."""

import pytest

from muster.schedulers.workspace.ignore_rules import find_rule, parse_rules


@pytest.mark.parametrize(
    ("line", "path", "is_folder", "left_out"),
    [
        ("build/", "build", True, True),  # it ignored nothing
        ("build/", "deep/build", True, True),
        ("build/", "build", False, False),
        ("*.log", "deep/x.log", False, True),
        ("/data", "deep/data", True, False),
        ("sub/*.py", "sub/deep/a.py", False, False),
        ("notes  # mine", "notes", False, True),
        ("  notes", "notes", False, True),
        ("a#b", "a#b", False, True),
        ("with space\\ ", "with space ", False, True),
        ("# comment", "# comment", False, False),
        *((f"a{separator}b", "b", False, False) for separator in "\x0b\x0c\x1c\x85\u2028\r"),  # only \n ends a line
        *((f"a{separator}b", f"a{separator}b", False, True) for separator in "\x0b\x0c\x1c\x85\u2028\r"),
        ("a\u2028", "a\u2028", False, True),
        ("a\r", "a", False, True),
    ],
)
def test_lines(line, path, is_folder, left_out):
    assert (find_rule(parse_rules(line), path, is_folder=is_folder) is not None) is left_out
