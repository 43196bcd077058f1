"""Receives the progress of a Hugging Face Trainer, for the status of global rank 0, at a port of this machine.

`node` is the part. `port` is open before the workers start; `endpoint` answers there, and is loaded when something
connects. `flags` and `variables` are those of `--trainer-callback`, which gives the Trainer muster's callback.
"""
