"""Where agents that wait for jobs are found and reached, for both sides. Standard library only.

`connection` connects to a holder, or listens as one. Both sides check that the other is the same user's. `default` says
whether a user wants the default hold, where that is, and how it is started. Only what submits jobs needs it.

What holders and clients do (`agent.hold`), and which apps are holds (`schedulers.local.holds`), is not here.
"""
