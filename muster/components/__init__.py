"""Components: `torchx run dist.ddp ...` and pipelines call them to build an AppDef. They never import the agent.

`dist` holds the three components, `application` parses `--name` and builds their AppDef. `flags` has the parameters
that set one flag of the agent each, those of features too. `topology` parses `-j`, `resources` builds the resources of
a node, `environment` reads `--env` and `--env_file`. `ComponentError` is the one error for a wrong argument.

From outside, import `dist`.
"""

from torchx.specs.finder import ComponentValidationException


class ComponentError(ComponentValidationException, ValueError):  # type: ignore[misc]
    """A wrong argument of a component, in one line that names the value and what is allowed.

    It is a `ValueError` for callers in Python. It is a `ComponentValidationException` because TorchX's command line
    turns only that and "component not found" into a line instead of a traceback.
    """
