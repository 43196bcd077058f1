"""What of an agent's records becomes an Event or an annotation; `tests/process/kubernetes` sends them."""

import re
import threading
from pathlib import Path

import pytest
from doubles.samples import make_record

from muster._shared.job_view import JobState, JobStatus
from muster.agent.features.job_object.sink import JobObject

PATH = "/apis/batch/v1/namespaces/team/jobs/app-x1-main"


class Collected(JobObject):
    """Sends nothing."""

    def _run(self) -> None:
        pass

    @property
    def told(self) -> list[tuple[str, str, str]]:
        """Type, reason and message of the Events."""
        return [(event["type"], event["reason"], event["message"]) for event in self._events]

    @property
    def annotations(self) -> dict[str, str]:
        """Those that wait."""
        return self._annotations

    def record(self, what: str, *, node: int | None = 0, number: int = 1, attempt: int = 0, **detail: object) -> None:
        """Write one record, a second after the epoch."""
        where = {"node": node, "node_index": node, "round": number, "attempt": attempt}
        self.write(make_record(what, time_s=1.0, detail=detail, **where))


def make(place: str = PATH, node_index: int = 0, **more: str) -> Collected:
    environ = {"MUSTER_JOB_OBJECT": place, "MUSTER_ACCOUNT_DIR": "/nowhere", **more}
    return Collected(environ, node_index, lambda line: None)


def test_the_lines_of_one_hang_are_one_event_and_its_end_is_another() -> None:
    job = make()
    job.record("hang_named", text="rank 1 keeps 3 ranks waiting")
    job.record("hang_named", text="in all_reduce, main.py:12")
    job.record("hang_ended", text="the job goes on: it has not hung")
    (*began, what), (*over, _) = job.told
    assert (began, over) == (["Warning", "MusterHang"], ["Normal", "MusterHang"])
    assert ("rank 1 keeps 3 ranks" in what, "in all_reduce, main.py:12" in what) == (True, True)
    [(name, value)] = job.annotations.items()
    assert (name, value.startswith("1970-01-01T00:00:01Z ")) == ("muster.torchx/hang", True)


def test_only_the_node_with_group_rank_0_tells_and_another_one_that_takes_over_knows_the_story() -> None:
    job = make(node_index=1)
    job.record("round_formed", node=1, nodes=3, world_size=6)
    job.record("round_broken", node=1, kind="membership", reason="node 0 (a) was lost: silence", hang=False)
    assert job.told == []
    job.record("round_formed", node=0, number=2, nodes=2, world_size=4)
    [(kind, name, text)] = job.told
    assert (kind, name, re.findall(r"\d", text)[:3]) == ("Normal", "MusterResized", ["2", "4", "3"])


def test_the_first_round_is_no_event_and_a_replaced_node_0_tells_of_a_start_again() -> None:
    job = make()
    job.record("round_formed", nodes=2, world_size=2)
    assert job.told == []
    replaced = make()
    replaced.record("round_formed", number=2, nodes=2, world_size=2)
    [(kind, name, text)] = replaced.told
    assert (kind, name, re.findall(r"\d", text)[-3:]) == ("Normal", "MusterRestarted", ["2", "2", "0"])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("stop", "all ranks stop at step 7"),
        ("pause", "all ranks pause at step 7"),
        ("join", "all ranks wait at step 7"),
        ("checkpoint", "all ranks save at step 7"),
    ],
)
def test_the_step_of_a_drain_is_told(kind: str, text: str) -> None:
    job = make()
    job.record("drain_begun", drain=1, kind=kind, limit_s=5.0)
    job.record("drain_committed", drain=1, step=7)
    assert job.told == [("Normal", "MusterDrain", text)]


def test_nodes_that_do_not_find_each_other_are_told_of_by_node_0_only() -> None:
    for index, told in ((0, [("Warning", "MusterFailed", "only 1 of 2 nodes joined")]), (1, [])):
        job = make(node_index=index)
        job.record("rendezvous_lost", node=None, number=0, reason="only 1 of 2 nodes joined")
        assert job.told == told


def test_a_job_that_succeeds_is_no_event() -> None:
    job = make()
    job.record("job_ended", succeeded=True, drained=False, reason="")
    assert job.told == []


def test_a_message_has_no_secret_and_no_control_characters_and_fits() -> None:
    secrets = {"MUSTER_SECRET_NAMES": "A_TOKEN B_KEY", "A_TOKEN": "abcdef", "B_KEY": "abcdefgh"}
    job = make(**secrets)
    reason = "ValueError: abcdefgh and abcdef\n \x1b[31mred" + "ä" * 2000
    job.record("job_ended", succeeded=False, drained=False, reason=reason)
    ((_, _, message),) = job.told
    assert message.startswith("ValueError: *** and *** redä")
    assert len(message.encode()) <= 1000


def test_roles_that_share_an_object_are_named() -> None:
    job = make(f"{PATH} critic")
    job.record("job_ended", succeeded=False, drained=False, reason="rank 0 failed")
    assert job.told == [("Warning", "MusterFailed", "critic: rank 0 failed")]
    assert job.annotations == {"muster.torchx/critic.failed": "1970-01-01T00:00:01Z rank 0 failed"}


def test_a_pod_without_a_token_is_told_so_once(tmp_path: Path) -> None:
    lines: list[str] = []
    environ = {"MUSTER_JOB_OBJECT": PATH, "MUSTER_ACCOUNT_DIR": str(tmp_path / "none")}
    job = JobObject(environ, 0, lines.append)
    status = JobStatus(step=3, rate=2.5, values=(("loss", 0.25),))
    job.write_status(status)
    job.write_status(status)
    job.close()
    (line,) = lines
    assert line.startswith("the job has ")


def test_an_api_server_that_is_silent_at_the_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was printed if the job had ended before the server refused."""
    lines: list[str] = []
    answers = threading.Event()
    monkeypatch.setattr("muster.agent.features.job_object.sink._CLOSE_S", 0.01)
    monkeypatch.setattr(JobObject, "_send", lambda *_args: str(answers.wait(60) and ""))
    job = JobObject({"MUSTER_JOB_OBJECT": PATH, "MUSTER_ACCOUNT_DIR": "/nowhere"}, 0, lines.append)
    job.write_status(JobStatus(step=3))
    job.close()
    answers.set()
    (line,) = lines
    assert line.startswith("the job's last ")


def test_progress_is_told_at_most_twice_a_minute_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    job, seconds = make(), [100.0]
    monkeypatch.setattr("time.monotonic", lambda: seconds[0])
    shown = []
    for step in range(13):  # a minute
        seconds[0] = 100.0 + 5 * step
        job.write_status(JobStatus(step=step, total=50, rate=0.2, values=(("loss", 1 / 3),)))
        shown += [text.partition("Z ")[2] for text in job.annotations.values()]
        job.annotations.clear()
    loss = "0.2 a second, loss 0.333333"
    assert shown == [f"step {step} of 50, {loss}" for step in (0, 6, 12)]
    job.write_status(JobStatus(step=13, total=50, rate=0.2, state=JobState.PAUSED))
    job.write_status(JobStatus(round=2))  # of the next attempt: no step yet
    job.close()
    assert [text.partition("Z ")[2] for text in job.annotations.values()] == ["paused at step 13"]
