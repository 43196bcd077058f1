"""ssh: replicas run on hosts that the user reaches by `ssh`, one on each.

`scheduler` is what TorchX calls, and `options` are those of `-cfg`. `hosts` reads who the hosts are, and asks the
user's script for them again and again. `request` turns an AppDef into what will run (pure, the dry run).
`checks` looks at all hosts at once before anything is started. `driver` is what the app's supervisor on this machine
loads. It starts a `link` for each replica, a process of this machine that holds the connection. `node_program.keeper`
is the program on the other side. It travels over the connection's standard input, and owns the replica. Unless the
option `stays` is set, it ends the replica when the connection is lost for good. `command` has the command lines of
`ssh`. The one that has looked at a host is lent to the link, so that each host is logged in to once.
"""

from typing import Final

from muster.schedulers.adapter.properties import Factory

create_scheduler: Final = Factory(name="ssh", creates="muster.schedulers.ssh.scheduler:SshScheduler", needs_linux=True)
