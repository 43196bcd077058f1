"""An agent inside a TrainJob of Kubeflow posts how far a script is that reports its steps."""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from harness import Tree

PROGRAM = """
import time
from muster import worker
for step in range(40):
    worker.step(step, total=40, loss=0.5)
    time.sleep(0.05)
"""


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.got.append((self.headers["Authorization"], body["trainerStatus"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_the_progress_of_a_script_without_a_trainer(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(PROGRAM)
    (tmp_path / "token").write_text("secret")
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.got = []
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        env = {
            **os.environ,
            "KUBEFLOW_TRAINER_SERVER_URL": f"http://127.0.0.1:{server.server_port}/status",
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token"),
            "http_proxy": "http://127.0.0.1:1",
        }
        flags = ["--standalone", "--nproc-per-node", "2", "--start", "cold", "--log-dir", str(tmp_path / "logs")]
        with Tree([sys.executable, "-m", "muster.agent", *flags, "main.py"], cwd=tmp_path, env=env) as tree:
            outcome = tree.wait()
        server.shutdown()
    assert outcome.exit_code == 0, outcome.explain()
    assert {token for token, _ in server.got} == {"Bearer secret"}
    first, last = server.got[0][1], server.got[-1][1]
    assert 0 <= first["progressPercentage"] < 100
    assert {"name": "total_steps", "value": "40"} in first["metrics"]
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    assert {"name": "current_step", "value": "39"} in last["metrics"]
    assert {"name": "loss", "value": "0.5"} in last["metrics"]
