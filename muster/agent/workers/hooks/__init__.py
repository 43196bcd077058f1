"""What `workers.program` adds to torch in a worker; it runs these files by their path when they are needed.

`groups` follows process groups, for the hang watch and so that the worker can end. `steps` counts the steps of
optimizers. These files are not modules of the worker, because `muster` may be another package there. The agent imports
none of them.

From outside, import nothing.

Not here: how torch is made to call them (`program`, and the folder `torch_backend` for what commands start).
"""
