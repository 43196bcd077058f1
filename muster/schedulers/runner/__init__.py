"""Adapts TorchX for the adapters. Each fact about one of its two lines (0.7 and the nightly) is here, once.

`roles` bridges roles, macros and workspaces of both lines, as `adapter.scheduler` does their schedulers. `app_codec`
keeps an AppDef as JSON. `option_parsing` parses `-cfg` strictly for all adapters, and `option_records` declares their
options as records. `builtins` registers TorchX's own schedulers again. `callers` tells which part of TorchX calls.
`command_line` prints errors as lines, and stops jobs with their command (Ctrl-Z). `dry_run` hides secrets in what
TorchX prints of a dry run. `config_file` refuses a `.torchxconfig` in one line. `live_lines` decides which part of the
program prints a job's lines, and `job_console` prints them to a terminal: with colours, alike ones once, progress bars
below.
"""
