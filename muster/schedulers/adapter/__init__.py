"""The seam for schedulers: what an adapter of muster is made of, for the three in this package and for others'.

A package registers its factory as an entry point of the group `torchx.schedulers`. If what that makes is a
`scheduler.PluginScheduler`, the command `muster` finds it by the scheduler's name in an app handle, and its methods
carry `stop`, `checkpoint`, `pause`, `resume`, `stacks`, `resize`, `recover`, `delete` and `prune`.

| module         | what                                                                                                |
|---             |---                                                                                                  |
| `scheduler`    | `PluginScheduler`, the base class, with one set of signatures for both lines of TorchX              |
| `supervised`   | `SupervisedScheduler`, the base class where replicas are processes or containers that a supervisor  |
|                | of muster owns: it starts them by a `supervision.driver.ReplicaDriver`, retries, resizes, ends them |
| `agent_role`   | from a role of an AppDef to its arguments, the agent's command and the agent's environment          |
| `status`       | `build_status`: what `torchx status` shows, from an `AppFacts`                                      |
| `records`      | `RecordReader`: restarts, hangs, rounds and steps, from what the agents write, read by any function |
| `log_position` | `Position`: resumes a log whose records have times after a break, without a loss or a repetition    |

What supervisors load, too, stands beside the package: `agent_command` rewrites the agent's command, `grace` decides how
long a stop may take, and `muster._shared.control.ask_roles` asks an app's agents by any function that runs a command on
a node.

All public names of the modules in the table are stable: a release that changes one says so in the change log. This
module imports nothing: supervisor processes load single modules of this package and must start fast.
"""
