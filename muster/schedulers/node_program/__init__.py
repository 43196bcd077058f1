"""One program on nodes, and the processes here that it serves: `muster exec` and `shell`, ssh, runs on holds elsewhere.

It is sent over a pipe to a Python on the node, as a text, and owns a replica, attaches to one, runs a command, or opens
a terminal. How an adapter reaches a node is in the adapter.

    both sides      `frames`: what travels, and its limits; `output_pipes`: the output of a command in order;
                    `run_files`: files of an agent's run, which are copied to this machine
    on the node     `command` runs a command or a terminal beside an agent, which `agents` finds; `keeper` owns a
                    replica of ssh; `held_run` gives a run to a node's holder. `served` is what they have in common
    on this side    `pipe`: what an adapter opens; `session`: the text of the program, and one of them on one node;
                    `link`: a process that stands for one node
"""
