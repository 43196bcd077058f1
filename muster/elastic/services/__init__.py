"""What torch's agent does beside running workers, in the process of the program that starts a job.

    worker_group   torch's WorkerGroup, its metrics and its events, from the agent's records
    file_timers    serves `FileTimerClient` in workers
    health_check   starts and stops the health check server

From outside, import from the modules.
"""
