"""ice-learn's `Events`: how the program that starts a job and its workers inform one another between two steps.

    flags      Events: all ranks of the job pause, save and stop at one step
    serving    what LocalElasticAgent does with them: the progress bar, and the questions at Ctrl-C

ice-learn's own `Events`, or an object with the same attributes, works too. Its events are those of one node, and the
ranks agree on no step. From outside, import `Events` of `flags` and `IceEvents` of `serving`.
"""
