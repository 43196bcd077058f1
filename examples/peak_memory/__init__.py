"""A feature of the agent as an example: `status.json` and `muster top` show each worker's peak memory.

Copy this folder to `muster/agent/features/peak_memory`, and add its row to the table of parts there:

    PartRow(name="peak_memory", wakes=lambda _: True),
"""
