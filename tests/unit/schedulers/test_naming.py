import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.schedulers import naming

LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
any_text = st.text(max_size=120) | st.from_regex(r"[A-Za-z0-9_./-]{1,120}", fullmatch=True)


@given(text=any_text, limit=st.integers(16, 63))
def test_every_text_gets_a_valid_label(text, limit):
    label = naming.build_label(text, limit=limit)
    assert LABEL.fullmatch(label)
    assert len(label) <= limit
    assert naming.build_label(text, limit=limit) == label
    assert naming.build_label(label, limit=limit) == label


@pytest.mark.parametrize(
    ("text", "label"),
    [("train", "train"), ("My_Trainer.py", "my-trainer-py"), ("1st", "app-1st"), ("", "app"), ("---", "app"),
     ("übung", "bung"), ("a__b", "a-b"), ("-x-", "x")],
)  # fmt: skip
def test_what_labels_look_like(text, label):
    assert naming.build_label(text) == label


def test_long_names_that_differ_only_at_the_end_stay_different():
    first, second = ("x" * 80 + end for end in "ab")
    assert naming.build_label(first) != naming.build_label(second)
    assert naming.build_label(first).startswith("x" * 50)


@given(name=any_text, index=st.integers(0, 99999), suffix=st.builds(naming.make_suffix))
def test_app_names_leave_room_for_what_is_appended(name, index, suffix):
    app = naming.build_app_name(name, suffix, reserve=6)
    assert app.endswith(f"-{suffix}")
    assert LABEL.fullmatch(app)
    assert len(f"{app}-{index}") <= 63


@given(names=st.lists(any_text, unique=True, max_size=6))
def test_roles_that_differ_get_labels_that_differ(names):
    labels = naming.build_role_labels(names)
    assert list(labels) == names
    assert len(set(labels.values())) == len(names)
    assert all(LABEL.fullmatch(label) and len(label) <= 20 for label in labels.values())


@given(app=any_text, role=any_text, index=st.integers(0, 10**6))
def test_replica_names_keep_their_index(app, role, index):
    name = naming.build_replica_name(app, role, index)
    assert LABEL.fullmatch(name)
    assert len(name) <= 63
    assert name.endswith(f"-{index}")


def test_suffixes_and_secrets_are_random():
    assert len({naming.make_suffix() for _ in range(100)}) == 100
    assert len({naming.make_secret() for _ in range(100)}) == 100
    assert re.fullmatch(r"[a-z][a-z0-9]{7}", naming.make_suffix())
    assert re.fullmatch(r"[0-9a-f]{64}", naming.make_secret())
