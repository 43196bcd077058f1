"""Apps for tests of a supervisor's decisions: events in, actions as short texts out."""

from pathlib import Path

from muster.schedulers.supervision.app_folder import AppFolder, AppSpec
from muster.schedulers.supervision.decisions import (
    Begin,
    Finish,
    Kill,
    Linger,
    Pause,
    ReplicaEnded,
    Start,
    Stop,
    build_state,
    decide,
)
from muster.schedulers.supervision.state import ReplicaId, SupervisedRole


def agents(replicas=2, **more):
    return SupervisedRole(name="trainer", replicas=replicas, runs_agent=True, **more)


def others(replicas=2, name="main", **more):
    return SupervisedRole(name=name, replicas=replicas, runs_agent=False, **more)


def begin(*plan):
    """An app whose supervisor has begun."""
    app = App(*plan)
    app.begin()
    return app


def build_spec(path, **more):
    """What an app is made of whose folder this is."""
    given = {"app_id": Path(path).name, "scheduler": "local_cwd", "driver": "a.b:c", "roles": (), "grace_s": 1.0}
    return AppSpec(folder=str(path), **{**given, **more})


def make_folder(path, **more):
    spec = build_spec(path, **more)
    folder = AppFolder(spec.folder)
    folder.create(spec)
    return folder


class App:
    """Drives `decide` and returns its actions as short texts: "start trainer/0"."""

    def __init__(self, *plan):
        self.plan = plan
        self.state = build_state(plan)

    def decide_event(self, event):
        self.state, actions = decide(self.plan, self.state, event)
        done = []
        for action in actions:
            if isinstance(action, Finish):
                done.append(f"finish {action.outcome.value}")
            elif isinstance(action, Linger):
                done.append("linger")
            elif isinstance(action, Pause):
                done.append(f"pause {action.replica} {action.delay_s:g}")
            else:
                verb = {Start: "start", Stop: "stop", Kill: "kill"}[type(action)]
                done += [f"{verb} {replica}" for replica in action.replicas]
        return done

    def begin(self):
        return self.decide_event(Begin())

    def end(self, name, exit_code, **more):
        role, _, index = name.partition("/")
        return self.decide_event(ReplicaEnded(replica=ReplicaId(role, int(index)), exit_code=exit_code, **more))

    def list_codes(self):
        return [each.code for each in self.state.reasons]

    def status(self, name):
        role, _, index = name.partition("/")
        return self.state.replicas[ReplicaId(role, int(index))].status
