"""The words of causes and verdicts, which components, schedulers and the agent have in common. Pure.

    causes   the classes of what a failure is due to, by name
    policy   the grammar of `--on`: what a user wants to follow from a failure

From outside, import any module.
"""
