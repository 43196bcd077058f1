"""The elastic agent: one process per node; starts, watches and restarts its workers. Standard library only."""
