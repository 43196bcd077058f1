"""What a TrainJob of Kubeflow is told, and what becomes of it where its server does not answer."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from doubles.job_samples import make_job

from muster._shared.contract import KubeflowEnv
from muster._shared.job_view import JobState, JobStatus, RankStatus
from muster._shared.records import replace
from muster.agent.features.train_job import sink as train_job
from muster.agent.features.train_job.sink import TrainJob, build_progress, is_wanted

STATUS = replace(make_job(2, 1), step=499, total=1000, eta_s=62.4, values=(("loss", 0.25), ("lr", "nan")))


class Server(HTTPServer):
    """A status server: it keeps what it gets, and answers with `code`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.code = 200
        self.got: list[tuple[str, str, dict[str, object]]] = []
        self.arrived = threading.Semaphore(0)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, self.headers["Authorization"], json.loads(body)))
        self.send_response(self.server.code)
        self.end_headers()
        self.server.arrived.release()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def environ(server: Server, tmp_path: Path) -> dict[str, str]:
    (tmp_path / "token").write_text("secret\n")
    url = f"http://127.0.0.1:{server.server_port}/apis/trainjobs/a/status"
    return {KubeflowEnv.URL: url, KubeflowEnv.TOKEN: str(tmp_path / "token")}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_job, "_EVERY_S", 0.01)


def test_the_body_of_a_request() -> None:
    body = build_progress(STATUS, 0.0)
    assert body == {
        "trainerStatus": {
            "lastUpdatedTime": "1970-01-01T00:00:00Z",
            "metrics": [
                {"name": "current_step", "value": "499"},
                {"name": "total_steps", "value": "1000"},
                {"name": "loss", "value": "0.25"},
                {"name": "lr", "value": "nan"},
            ],
            "progressPercentage": 50,
            "estimatedRemainingSeconds": 62,
        }
    }


def test_the_last_step_is_100_only_when_the_job_has_succeeded() -> None:
    last = replace(STATUS, step=999, eta_s=None)
    assert build_progress(last, 0.0)["trainerStatus"]["progressPercentage"] == 99
    ended = build_progress(replace(last, state=JobState.ENDED, exit_code=0), 0.0)["trainerStatus"]
    assert (ended["progressPercentage"], ended["estimatedRemainingSeconds"]) == (100, 0)
    failed = build_progress(replace(last, state=JobState.ENDED, exit_code=1), 0.0)["trainerStatus"]
    assert failed["progressPercentage"] == 99


@pytest.mark.parametrize(
    "status",
    [
        JobStatus(),
        JobStatus(optimizer_steps=5, ranks=(RankStatus(global_rank=0, node=0, local_rank=0, optimizer_steps=5),)),
        JobStatus(step=5, total=10, ranks=(RankStatus(global_rank=0, node=0, local_rank=0),)),  # of a progress bar
    ],
)
def test_nothing_is_told_of_a_script_that_reports_no_step(status: JobStatus) -> None:
    assert build_progress(status, 0.0) is None


def test_a_script_that_does_not_know_its_end_has_no_percentage() -> None:
    progress = build_progress(replace(STATUS, total=None, eta_s=None), 0.0)["trainerStatus"]
    assert set(progress) == {"lastUpdatedTime", "metrics"}


def test_names_and_values_are_cut_to_what_the_server_takes() -> None:
    status = replace(STATUS, values=(("n" * 70, "v" * 70), ("", 1.0)))
    metrics = build_progress(status, 0.0)["trainerStatus"]["metrics"]
    assert metrics[2:] == [{"name": "n" * 64, "value": "v" * 64}]


def test_the_newest_is_sent_with_the_token_of_the_file(server: Server, environ: dict[str, str], tmp_path: Path) -> None:
    lines: list[str] = []
    job = TrainJob(environ, lines.append)
    job.write_status(STATUS)
    assert server.arrived.acquire(timeout=30)
    (tmp_path / "token").write_text("newer")
    job.write_status(replace(STATUS, step=500))
    job.write_status(replace(STATUS, step=501))
    job.close()
    job.close()
    assert [each[:2] for each in server.got][:1] == [("/apis/trainjobs/a/status", "Bearer secret")]
    _, token, body = server.got[-1]
    assert token == "Bearer newer"
    assert body["trainerStatus"]["metrics"][0]["value"] == "501"
    assert lines == []


def test_what_could_not_be_sent_is_sent_again_with_one_line(server: Server, environ: dict[str, str]) -> None:
    lines: list[str] = []
    server.code = 503
    job = TrainJob(environ, lines.append)
    job.write_status(STATUS)
    assert server.arrived.acquire(timeout=30)
    assert server.arrived.acquire(timeout=30)
    server.code = 200
    job.close()
    (line,) = lines
    assert "with status 503" in line


@pytest.mark.parametrize("code", [403, 404, 422])
def test_a_server_that_refuses_is_asked_no_more(server: Server, environ: dict[str, str], code: int) -> None:
    lines: list[str] = []
    server.code = code
    job = TrainJob(environ, lines.append)
    job.write_status(STATUS)
    assert server.arrived.acquire(timeout=30)
    job._thread._thread.join(30)
    job.write_status(replace(STATUS, step=600))
    job.close()
    assert len(server.got) == len(lines) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({KubeflowEnv.URL: "ftp://x"}, "is 'ftp://x', which is not the address of an HTTP server"),
        ({KubeflowEnv.TOKEN: "/no/such/file"}, "No such file"),
        ({KubeflowEnv.URL: "http://127.0.0.1:1/x"}, "refused"),
    ],
)
def test_what_cannot_work_is_one_line(environ: dict[str, str], change: dict[str, str], words: str) -> None:
    lines: list[str] = []
    job = TrainJob({**environ, **change}, lines.append)
    job.write_status(STATUS)
    job.close()
    (line,) = lines
    assert words in line


def test_inside_a_train_job_only_and_unless_it_is_switched_off(environ: dict[str, str]) -> None:
    assert is_wanted(environ)
    assert not is_wanted({})
    assert not is_wanted({KubeflowEnv.URL: "http://x"})
    assert not is_wanted({**environ, KubeflowEnv.OFF: "true"})


def test_a_server_that_is_silent_at_the_end_is_told(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    answers = threading.Event()
    monkeypatch.setattr(train_job, "_CLOSE_S", 0.01)
    monkeypatch.setattr(TrainJob, "_send", lambda *_args: str(answers.wait(60) and ""))
    sink = TrainJob(environ, lines.append)
    sink.write_status(STATUS)
    sink.close()
    answers.set()
    assert ["within 0.01 s" in each for each in lines] == [True]
