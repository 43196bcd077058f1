"""`--notify`: tells a command of the user's what has become of the job. Loaded with the flag only.

`decisions` is pure: which event is told, on which node, with which facts. `notifier` runs the command for it, once, and
gives it its environment; `runtime.limited_command` is the run, with its time limit.

From outside, import `Notifier`.
"""

from muster.agent.node.notify.notifier import Notifier

__all__ = ["Notifier"]
