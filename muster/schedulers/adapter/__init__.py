"""The seam for schedulers: what an adapter is made of, for those of muster and for those of other packages.

A package registers its factory as an entry point of the group `torchx.schedulers`. If the factory makes a
`PluginScheduler`, the command `muster` finds it by the scheduler's name in an app handle. Its methods carry `run`,
`status`, `list`, `stop`, `checkpoint`, `pause`, `resume`, `stacks`, `exec`, `shell`, `resize`, `recover`, `delete` and
`prune`. The page *Write an adapter* builds one. `muster.testing` has the tests that each adapter must pass.

An adapter derives from one of three classes. Each does more than the one before:

| class                 | for replicas that                                                                           |
|---                    |---                                                                                          |
| `PluginScheduler`     | something else starts, watches and retries: a cluster, a batch system                       |
| `SupervisedScheduler` | a supervisor of muster on this machine owns: it starts them by a `ReplicaDriver`, retries,  |
|                       | resizes, ends them, and keeps the app's state in a folder                                   |
| `ProcessScheduler`    | are such processes, or programs here that stand for something elsewhere: its `ProcessDriver`|
|                       | writes and reads their logs                                                                 |

The names of `__all__` are stable: a release that changes one says so in the change log. From outside of muster, import
them from this package only: the modules that have them may change. Each is loaded when it is first asked for, because
supervisor processes, which load drivers, must start fast. Type checkers read `__init__.pyi`. This package has
`scheduler`, `supervised` and `process_scheduler` with the three classes, `properties` (what a scheduler is like),
`factories` (where schedulers are found), `agent_role` (from a role to commands and variables) and `process_plan` (on to
what a `ProcessDriver` starts). It also has `waiting_line` (what is said while somebody waits), `status`, `records`
(what agents write) and `log_position` (logs whose records have times). What is known of an app, the codes of reasons,
and their words are in `schedulers.wording`.
"""

from importlib import import_module
from typing import Any, Final

_NAMES: Final = {
    # the base classes
    "schedulers.adapter.properties": "Factory Properties",
    "schedulers.adapter.scheduler": "PluginScheduler LogRequest Leftover ListedApp measure_folder",
    "schedulers.adapter.supervised": "SupervisedScheduler AgentWords combine_facts",
    "schedulers.adapter.process_scheduler": "ProcessScheduler ERROR_FILE read_agent_words",
    # options of `-cfg`
    "schedulers.runner.option_parsing": "StrictOpts",
    "schedulers.runner.option_records": "option Option declare_options parse_options "
    "build_choice_parser build_pattern_parser parse_count parse_seconds parse_words DETACH ENV GRACE_S",
    # from an AppDef to commands and variables
    "schedulers.adapter.process_plan": "plan_replica build_process_spec mask_plans",
    "schedulers.adapter.agent_role": "AgentPlace ReplicaCommand assign_arguments "
    "translate_replica build_agent_args build_agent_env",
    "schedulers.runner.roles": "apply_macros build_role_plan count_cpus find_elastic_role get_workspace_path "
    "note_workspace describe_missing_script share_workspace",
    "schedulers.runner.app_codec": "dump_app load_app",
    "schedulers.agent_command": "is_agent_role build_ask_command AGENT_ENTRY",
    "schedulers.grace": "decide_app_grace_s",
    "schedulers.naming": "build_app_name build_role_labels build_replica_name make_suffix make_secret derive_token",
    "schedulers.secret_variables": "mask_env mask_args list_named_secrets",
    "_shared.contract": "Env AGENT_BUNDLE_NAME WORKSPACE_BUNDLE_NAME AskKind AskOutcome",
    # what travels with a job
    "schedulers.bundle": "build_agent_bundle",
    "schedulers.workspace.packing": "build_workspace_bundle write_workspace_bundle "
    "copy_workspace describe_left_out BundleError",
    # replicas under a supervisor
    "schedulers.supervision.driver": "ReplicaDriver EventQueue StartError Handle DriverFactory",
    "schedulers.supervision.events": "ReplicaEnded",
    "schedulers.supervision.state": "ReplicaId SupervisedRole",
    "schedulers.supervision.app_folder": "AppSpec AppFolder AppRecord StateError",
    "schedulers.supervision.registry": "AppRegistry find_state_dir",
    "schedulers.supervision.asking": "AskNode",
    "schedulers.processes.driver": "ProcessDriver Launch",
    "schedulers.processes.plan": "LOOPBACK ReplicaPlan build_details",
    # what `torchx status` shows
    "schedulers.wording.facts": "AppFacts ExplainedReplica",
    "schedulers.wording.job_facts": "JobFacts",
    "schedulers.wording.reasons": "Code Reason Reasons has_code",
    "schedulers.wording.words": "word word_all",
    "schedulers.wording.job_line": "format_line",
    "schedulers.adapter.status": "build_status check_replica",
    "schedulers.adapter.records": "RecordReader ReadBytes",
    "schedulers.failure_report": "parse_report explain_report find_usage_line read_error_file",
    # logs
    "schedulers.lines": "ByteSource read_lines LineSplitter TimedLine add_time",
    "schedulers.adapter.log_position": "Position LogBroken ReadRecords follow_records",
    "schedulers.timestamps": "Timestamp parse_timestamp",
    "schedulers.processes.file_logs": "FileSource",
    "schedulers.processes.agent_files": "find_newest_run read_report",
    # what `muster` asks
    "_shared.control": "ControlError ExitCode NOT_REACHED RoleNodes ask_roles call_limited close_stop count_nodes",
    "_shared.reports": "Answer",
    "schedulers.node_program.pipe": "NodePipe start_pipe pump_pipe",
    # GPUs
    "schedulers.gpus": "DeviceRequest GpuError VISIBLE list_gpus "
    "list_devices needs_sharing share_devices assign_devices",
    # errors that TorchX prints as one line
    "schedulers.errors": "SchedulerError EngineError OptionError "
    "UnknownAppError EndedAppError RightError describe_os_error",
}
"""Where the public names are, below `muster`."""

_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)  # noqa: PLE0605  # type checkers read the stub


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"muster.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
