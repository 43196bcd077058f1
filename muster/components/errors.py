"""The one error of the components: what the caller wrote is wrong."""

from torchx.specs.finder import ComponentValidationException


class ComponentError(ComponentValidationException, ValueError):  # type: ignore[misc]
    """A wrong argument of a component, in one line that names the value and what is allowed.

    A `ValueError` for callers in Python. A `ComponentValidationException` because that and "component not found"
    are all that TorchX's command line turns into a line instead of a traceback.
    """
