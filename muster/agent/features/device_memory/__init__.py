"""Before workers on GPUs are restarted, waits until the memory of the last ones is free.

`node` is the part, which holds the start back, and waits in a thread.
"""
