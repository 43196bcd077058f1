"""Tells users of kubectl how a job fares, by Events and annotations of its Job or JobSet. `sink` is all of it."""
