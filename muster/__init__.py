"""muster: start, supervise and heal distributed PyTorch jobs, as a plug-in for TorchX."""

__version__ = "0.1.0"
