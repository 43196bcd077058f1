"""The job's report fits into one frame, however many ranks have failed and however long their texts are."""

import json

import pytest
from doubles.samples import make_failure

from muster._shared.codec import encode_message
from muster._shared.fields import Shared
from muster._shared.reports import FinalFailure, Stack
from muster.agent.diagnosis.root_cause import LEFT_OUT, DatedFailure, build_report
from muster.agent.rendezvous.consensus.actions import JobEnd
from muster.agent.rendezvous.protocol.framing import FRAME_LIMIT_BYTES


@pytest.mark.parametrize("character", ["x", "\U0001f40c", "\x1b"])
def test_a_report_of_thousands_of_ranks_with_long_texts_fits_into_one_frame(character: str) -> None:
    seen = [
        DatedFailure(
            when_s=float(rank),
            failure=make_failure(
                node=rank // 8,
                node_index=rank // 8,
                host="a-rather-long-name-of-a-host.example",
                local_rank=rank % 8,
                global_rank=rank,
                exit_code=1,
                exception=character * 500,
                traceback=character * 4000,
                stderr_tail=(character * 200,) * 20,
            ),
        )
        for rank in range(4096)
    ]
    stacks = tuple(Stack(global_rank=rank, node=0, local_rank=0, text=character * 5000) for rank in range(4096))
    report = build_report("run", FinalFailure(cause="why"), 0, 1, seen, stacks)
    frame = encode_message(JobEnd(succeeded=False, report=Shared(report), printer_id="m0"), FRAME_LIMIT_BYTES)
    assert len(frame) < FRAME_LIMIT_BYTES
    assert json.loads(frame)["report"]["failures"][0]["traceback"] == character * 4000
    assert report.failures[0].traceback == character * 4000  # the root cause is whole
    assert (len(report.failures), len(report.stacks)) == (4096, 4096)
    assert report.stacks[-1].text == LEFT_OUT


def test_an_ordinary_report_is_not_shortened() -> None:
    stacks = (
        Stack(global_rank=1, node=0, local_rank=1, text="b"),
        Stack(global_rank=0, node=0, local_rank=0, text="a"),
    )
    assert build_report("run", FinalFailure(cause="why"), 0, 1, (), stacks).stacks == stacks[::-1]
