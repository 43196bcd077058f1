"""The status of a job: what is written is what its schema says and is read again, of any size."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from doubles.job_samples import SAMPLES, make_ended, make_job, make_waiting

from muster._shared import job_view
from muster._shared.codec import decode, encode
from muster._shared.contract import STATUS_LIMIT_BYTES
from muster._shared.job_view import LISTED_NODES, LISTED_RANKS, JobStatus, SlowRank
from muster._shared.records import replace
from muster.schedulers.failure_report import parse_status

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = Path(job_view.__file__).parent / "status.schema.json"


def list_samples() -> Iterator[JobStatus]:
    yield make_waiting()
    yield make_ended(8, 1, exit_code=1)
    yield make_job(1 << 10, 1 << 9)
    yield make_job(64, 64)
    for make in SAMPLES.values():
        for ranks, nodes in ((1, 1), (8, 2)):
            yield make(ranks, nodes)


def test_the_schema_in_the_package_is_that_of_the_records() -> None:
    spec = importlib.util.spec_from_file_location("status_schema", ROOT / "docs/status_schema.py")
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert SCHEMA.read_text() == module.print_schema(), "run `python docs/status_schema.py`"


def test_what_is_written_fits_the_schema_and_is_read_again() -> None:
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    for sample in list_samples():
        data = json.loads(encode(sample, STATUS_LIMIT_BYTES))
        validator.validate(data)
        assert decode(JobStatus, data) == sample
    for wrong in ({"state": "asleep"}, {"step": -1}, {"step": 2**63}, {"ranks": [{"node": 0}]}, {"nodes": 3}):
        assert not validator.is_valid(wrong), wrong


def test_the_largest_status_has_a_limit() -> None:
    listed = make_job(LISTED_RANKS, LISTED_NODES)
    wide = tuple(replace(rank, last_line="\u20ac" * 1000, phase="x" * 1000) for rank in listed.ranks)
    long = tuple(replace(event, text="x" * 10_000) for event in listed.events * 50)
    text = encode(replace(listed, ranks=wide * 3, events=long, reason="y" * 10_000), STATUS_LIMIT_BYTES)
    assert len(text) <= STATUS_LIMIT_BYTES
    read = decode(JobStatus, json.loads(text))
    assert (len(read.ranks), len(read.events), len(read.nodes)) == (LISTED_RANKS, 32, LISTED_NODES)


def test_of_a_status_that_is_damaged_the_rest_is_read() -> None:
    data = json.loads(encode(make_job(8, 1), STATUS_LIMIT_BYTES))
    data["ranks"][2]["step"] = -1
    data["ranks"][3] = "rank"
    data["ranks"][4]["rate"] = 1e300
    data["eta_s"] = "soon"
    found = parse_status(json.dumps(data).encode())
    assert [rank.global_rank for rank in found.ranks] == [0, 1, 2, 4, 5, 6, 7]
    assert (found.ranks[2].step, found.ranks[3].rate, found.eta_s, found.step) == (None, None, None, 8_119)


@pytest.mark.parametrize(
    ("finding", "text"),
    [
        (
            SlowRank(global_rank=3, node=1, host="b", is_chronic=True, late_s=0.21, late_fraction=0.34),
            "rank 3 on b is 0.21 s late at each step (34 % of it)",
        ),
        (SlowRank(global_rank=3, node=1, is_chronic=False, late_s=41.4), "rank 3 was 41 s late once"),
    ],
)
def test_a_slow_rank_in_words(finding: SlowRank, text: str) -> None:
    assert finding.describe() == text
