"""The one error of the components: an argument is wrong."""

from torchx.specs.finder import ComponentValidationException


class ComponentError(ComponentValidationException, ValueError):  # type: ignore[misc]
    """A wrong argument of a component, in one line that names the value and what is allowed.

    It is a `ValueError` for callers in Python. It is a `ComponentValidationException` because TorchX's command line
    turns only that and "component not found" into a line instead of a traceback.
    """
