"""Components: what `torchx run dist.ddp ...` and pipelines turn into an AppDef. They never import the agent.

`dist` holds the three components, `application` builds their AppDef. `topology` reads `-j`, `names` reads `--name`,
`resources` says what a node needs, `errors` is the one error of a wrong argument.

From outside, import `dist`.
"""
