"""What components, schedulers, agent, workers and the Python API share. Standard library only.

    contract       what they must agree on: variables, exit codes, file names, the layout of the status page
    records        cheap frozen records, and `assert_never` for unions of them
    fields         the types of their fields, with limits
    codec          records to JSON and back, from those types alone
    reports        what a job tells people, as records: failures, stacks, its report, its status, answers
    foreign_files  reads files and JSON that anything may have written
    control        how commands and adapters ask a running job, and join the answers of its roles
    guard          the agent's parent: kills what is left when the agent ends, and fences when the lease expires
    processes      process trees, cores, and the system calls that Python lacks
    ownership      whether another user could change or replace a file or folder
    programs       whether the program of a job exists
    suspension     stops a whole job for a while (Ctrl-Z), and continues it
    debugger       pdb in one worker, at the terminal of its node's agent
    progress_bars  the live rows at the bottom of a terminal

Nothing here imports a room. `muster.worker` imports `contract` and, at a breakpoint, `debugger`.
"""
