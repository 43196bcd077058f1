"""The agent's command line, parsed into its configuration.

`arguments.parse_args` turns the command line and the environment into one `AgentConfig`; it is the only place of the
agent that reads variables. `flag_table` lists every flag as data. `command_line` parses the words by that table.
`rendezvous_flags` parses the group of flags with its own grammar. `help_text` formats `--help` and `--help-all`, which
alone load it.

Not here: the configuration itself (`agent.config`), and `-j` and `-cfg`, which belong to components and schedulers.

From outside, import `arguments.parse_args`; `muster.run` also imports `flag_table`, `rendezvous_flags` and
`help_text`, and features `flag_table` and `command_line`.
"""
