"""Where agents that wait for jobs are found and reached, for both sides. Standard library only.

`connection` connects to a holder, or listens as one. Both sides check that the other is the same user's.

What holders and clients do (`agent.hold`), and which apps are holds (`schedulers.local.holds`), is not here.
"""
