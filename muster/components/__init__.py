"""Components: what `torchx run dist.ddp ...` and pipelines turn into an AppDef. They never import the agent."""
