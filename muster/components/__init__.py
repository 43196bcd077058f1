"""Components: `torchx run dist.ddp ...` and pipelines call them to build an AppDef. They never import the agent.

`dist` holds the three components, `roles` joins several roles into one app, `application` parses `--name` and builds
their AppDef. `flags` has the parameters that set one flag of the agent each, those of features too. `topology` parses
`-j`, `resources` builds the resources of a node, `environment` reads `--env` and `--env_file`. `errors` holds the one
error for a wrong argument. `help_text` formats the help of `muster run dist.ddp`.

From outside, import `dist` and `roles`; `muster.cli` also imports `help_text`.
"""
