"""The one line that says how a job is doing, of `torchx status`, `muster status` and `muster list`.

    RUNNING: attempt 1, 2 restarts left; 2 of 2 nodes run; step 812 of 1000, 7.9 a second; ETA 24 s; since 14:02
    FAILED: rank 3 on node 1 (vm) exited with code 1 (ValueError: boom); ended at 14:05

State and reason come first, then the attempt and the restarts that are left, the nodes, how far the job is and how
fast, when it is done, and since when it is in its state. For a paused job, the step and the time of the pause come
before all else. What is not known is left out. TorchX prints the state itself. Its message is the line without the
state, or the reason alone if the app has ended.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from torchx.specs import AppState
from torchx.specs.api import is_terminal

from muster._shared.contract import RoleKey, show_controls
from muster._shared.reports import format_duration
from muster._shared.role_policy import parse_policy
from muster.schedulers.wording.facts import AppFacts
from muster.schedulers.wording.reasons import Code, JobFacts, Reason, to_data
from muster.schedulers.wording.words import format_clock, word, word_all

if TYPE_CHECKING:  # see `failure_report`
    from muster._shared.job_view import JobStatus

_MOST_NAMED: Final = 8
_FIELDS: Final = ("restarts_left", "step", "total", "optimizer_steps", "rate", "still_s", "snapshot_step", "snapshot_s")
"""What JSON has of a job's status as it is."""
_GOES_ON: Final = (AppState.UNSUBMITTED, AppState.SUBMITTED, AppState.PENDING, AppState.RUNNING)


def format_line(facts: AppFacts, *, shows_progress: bool = True) -> str:
    """Return the one line of a job, with its state. Without `shows_progress`, leave out the progress."""
    details = format_details(facts, shows_progress=shows_progress)
    return f"{name_state(facts)}: {details}" if details else name_state(facts)


def format_details(facts: AppFacts, *, shows_progress: bool = True) -> str:
    """Return the same line without the state, which is shown apart."""
    return show_controls("; ".join(_list_clauses(facts, facts.state.name.lower(), shows_progress)))


def format_message(facts: AppFacts) -> str:
    """Return TorchX's message: the line without the state. "": there is nothing to say."""
    clauses = _list_clauses(facts) if facts.state in _GOES_ON else _list_reasons(facts)
    return show_controls("; ".join(clauses))


def name_state(facts: AppFacts) -> str:
    """Return TorchX's name of the state, with what a running job does: "RUNNING (paused)"."""
    from muster._shared.job_view import JobState

    states = {each.status.state for each in facts.jobs.values() if each.status is not None}
    if facts.state is not AppState.RUNNING or len(states) != 1 or states == {JobState.RUNNING}:
        return str(facts.state.name)
    return f"{facts.state.name} ({states.pop().value})"


def build_data(facts: AppFacts) -> dict[str, object]:
    """Return what the line says, as values for programs: JSON's types. Keys are only ever added."""
    nodes = count_nodes(facts)
    return {
        "state": facts.state.name,
        "line": format_line(facts),
        "reason": show_controls("; ".join(_list_reasons(facts))),
        "reasons": build_reasons(facts.reasons),
        "restarts": facts.restarts,
        "nodes": nodes,
        "since_s": find_since_s(facts),
        "submitted_s": facts.submitted_s,
        "jobs": {role: _build_job(job) for role, job in facts.jobs.items()},
    }


def build_reasons(reasons: Iterable[Reason]) -> list[dict[str, object]]:
    """Return reasons for programs: code, facts and words."""
    return [{**to_data(each), "words": show_controls(word(each))} for each in reasons]


def describe_status(status: "JobStatus") -> str:
    """Return how far a job is, in a few words, or since when it is paused. "": not known."""
    return show_controls(status.describe(f" since {format_clock(status.paused_since_s)}"))


def count_nodes(facts: AppFacts) -> dict[str, int]:
    """Return how many nodes there are to be, run, are spare, are lost and run without a part, all roles together."""
    replicas = facts.replicas or ()
    states = Counter(each.state for each in replicas)
    statuses = [each.status for each in _list_live_jobs(facts).values() if each.status is not None]
    return {
        "all": sum(1 for each in replicas if each.state is not AppState.CANCELLED),
        "running": states[AppState.RUNNING],
        "spare": sum(each.nodes_spare for each in statuses),
        "lost": sum(count for count, _ in _find_lost(facts).values()),
        "apart": sum(_count_apart(facts, role, job) for role, job in _list_live_jobs(facts).items()),
    }


def _find_lost(facts: AppFacts) -> dict[str, tuple[int, list[tuple[int, str]]]]:
    """Return how many nodes of each role are lost, and the index and host of those that are known.

    A node is lost if the leader has lost it, or if it has ended for good: a job that waits for nodes has formed no
    round that would know of the last ones.
    """
    if facts.state not in _GOES_ON:
        return {}
    replicas, found = facts.replicas or (), {}
    for role in {**dict.fromkeys(each.role for each in replicas), **facts.jobs}:
        lost = [(each.id, each.hostname) for each in replicas if each.role == role and each.state is AppState.FAILED]
        status = facts.jobs[role].status if role in facts.jobs else None
        if status is not None:
            ended = {index for index, _ in lost}
            left = (each for each in status.nodes if each.state.value == "lost" and each.node_index not in ended)
            lost += [(each.node_index, each.host) for each in left]
        found[role] = (max(len(lost), 0 if status is None else status.nodes_lost), sorted(lost))
    return found


def _count_apart(facts: AppFacts, role: str, job: JobFacts) -> int:
    """Return the nodes that run and take no part in the round.

    The job goes on without them, or they have not joined yet.
    """
    status = job.status
    if status is None or status.state.value != "running" or not status.nodes:
        return 0
    if sum(node.ranks for node in status.nodes) != status.world_size:  # nodes are missing
        return 0
    running: int = sum(each.role == role and each.state is AppState.RUNNING for each in facts.replicas or ())
    return max(0, running - status.nodes_running - status.nodes_spare)


def find_since_s(facts: AppFacts) -> float | None:
    """Return since when the app is in its state, in wall-clock seconds. None: not known."""
    statuses = [each.status for each in facts.jobs.values() if each.status is not None]
    times = [each.since_s for each in statuses if each.since_s is not None]
    return max(times) if times and facts.state is AppState.RUNNING else facts.since_s


def find_eta_s(status: "JobStatus") -> float | None:
    """Return the seconds until a job's last step at its present rate. None: not known, or it stands still."""
    from muster._shared.job_view import JobState

    if status.still_s is not None:
        return None
    if status.eta_s is not None or status.state is not JobState.RUNNING:
        return status.eta_s
    if status.step is None or status.total is None or status.rate <= 0 or status.step >= status.total:
        return None
    return (status.total - status.step) / status.rate


def _list_clauses(facts: AppFacts, state: str = "", shows_progress: bool = True) -> list[str]:
    """Return all that is known. `state`: see `words.word_all`."""
    jobs = _list_live_jobs(facts)
    progress = list(_list_progress(jobs)) if shows_progress else []
    is_paused = any(job.status is not None and job.status.state.value == "paused" for job in jobs.values())
    before, after = (progress, []) if is_paused else ([], progress)  # that it waits for a person comes first
    nodes = [*_list_nodes(facts), *_list_restarts(facts)]
    clauses = [*before, *_list_reasons(facts, state), *_list_attempts(jobs), *nodes, *after]
    since_s = find_since_s(facts)
    if since_s is not None:
        has_ended = is_terminal(facts.state)
        clauses.append(f"{'ended at' if has_ended else 'since'} {format_clock(since_s)}")
        if has_ended and facts.submitted_s is not None:
            clauses[-1] += f" after {format_duration(since_s - facts.submitted_s, 0)}"
    return clauses


def _list_reasons(facts: AppFacts, state: str = "") -> list[str]:
    """Return why it is in its state. A job that runs and has trouble says so first."""
    trouble = _name_roles({role: word_all(job.trouble) for role, job in _list_live_jobs(facts).items()})
    return [*trouble, *filter(None, [word_all(facts.reasons, state=state)])]


def _list_live_jobs(facts: AppFacts) -> Mapping[str, JobFacts]:
    """Return what agents report of an app that runs. If it has ended, the line gives the reason."""
    return facts.jobs if facts.state in _GOES_ON else {}


def _list_attempts(jobs: Mapping[str, JobFacts]) -> Iterator[str]:
    texts = {}
    for role, job in jobs.items():
        count = None if job.status is None else job.status.restarts_left
        left = "" if count is None else f"{count} restart{'s'[: count != 1]} left"
        left = "no restarts allowed" if job.attempt == count == 0 else left
        texts[role] = ", ".join(filter(None, (f"attempt {job.attempt}" if job.attempt or left else "", left)))
    same = next(iter(texts.values())) if len(texts) > 1 and len(set(texts.values())) == 1 else ""
    return iter([f"each role: {same}"]) if same else _name_roles(texts)


def _list_nodes(facts: AppFacts) -> Iterator[str]:
    nodes = count_nodes(facts)
    if facts.state is not AppState.RUNNING or not nodes["all"]:
        return
    more = ""
    if nodes["spare"]:
        more += f", {nodes['spare']} of them {'is a spare' if nodes['spare'] == 1 else 'are spares'}"
    if nodes["apart"]:
        more += f", {nodes['apart']} of them take{'s'[: nodes['apart'] == 1]} no part"
    if nodes["lost"]:
        more += f", {nodes['lost']} {'is' if nodes['lost'] == 1 else 'are'} lost{_name_lost(facts)}"
    verb = "runs" if nodes["running"] == 1 else "run"
    yield f"{nodes['running']} of {nodes['all']} node{'s'[: nodes['all'] != 1]} {verb}{more}"


def _list_restarts(facts: AppFacts) -> Iterator[str]:
    """Return how often the policies of roles had their replicas started again."""
    for role in facts.app.roles if facts.state is AppState.RUNNING else ():
        own = [each for each in facts.replicas or () if each.role == role.name]
        reasons = [reason for each in own for reason in getattr(each, "reasons", ())]
        count = sum(reason.count or 0 for reason in reasons if reason.code is Code.RESTARTS)
        if count:
            extra = "" if parse_policy(role.name, role.metadata.get(RoleKey.POLICY)).critical else " (not critical)"
            yield f"{role.name}{extra} {word(Reason(code=Code.RESTARTS, count=count))}"


def _name_lost(facts: AppFacts) -> str:
    """Return the names of the lost nodes in brackets. "": none is known.

    If another node now has the number of a lost one, the lost ones are named by their hosts.
    """
    lost = _find_lost(facts)
    known = [(role, index, host) for role, (_, nodes) in lost.items() for index, host in nodes]
    names = [str(index) for _, index, _ in known] if len(lost) == 1 else [f"{role}/{index}" for role, index, _ in known]
    word = "" if len(lost) > 1 else f"node{'s'[: len(names) != 1]} "
    nodes = [(each.role, each.id) for each in facts.replicas or ()]
    if len(set(nodes)) < len(nodes) and all(host for _, _, host in known):
        word, names = "on ", [host for _, _, host in known]
    shown = list(dict.fromkeys(names))[:_MOST_NAMED]
    left = sum(count for count, _ in lost.values()) - sum(name in shown for name in names)
    return f" ({word}{', '.join(shown)}{f' and {left} more' if left else ''})" if shown else ""


def _list_progress(jobs: Mapping[str, JobFacts]) -> Iterator[str]:
    texts = {}
    for role, job in jobs.items():
        eta_s = None if job.status is None else find_eta_s(job.status)
        text = "" if job.status is None else describe_status(job.status)
        texts[role] = text if eta_s is None else f"{text}; ETA {format_duration(eta_s, 0)}"
    return _name_roles(texts)


def _name_roles(texts: Mapping[str, str]) -> Iterator[str]:
    """Return the roles that report something. If the app has several roles, their names are included."""
    return (text if len(texts) == 1 else f"{role}: {text}" for role, text in texts.items() if text)


def _build_job(job: JobFacts) -> dict[str, object]:
    from muster._shared.job_view import JobStatus

    status = JobStatus() if job.status is None else job.status
    return {
        "state": None if job.status is None else status.state.value,
        "trouble": word_all(job.trouble),
        "attempt": job.attempt,
        **{name: getattr(status, name) for name in _FIELDS},
        "eta_s": find_eta_s(status),
        "values": dict(status.values),
    }
