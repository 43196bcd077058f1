"""`--notify`: reports to a command of the user what has become of the job.

`flags` has the flag. `decisions` is pure: it decides which event is reported, on which node, and with which facts.
`sink` builds the command's environment and runs the command once per event. `features.limited_command` is the run with
its time limit.
"""
