"""What components, schedulers, agent, workers and the Python API share. Standard library only.

    contract       what they must agree on: variables, exit codes, file names
    layouts        the words of the memory that an agent and its workers share
    records        cheap frozen records, and `assert_never` for unions of them
    transitions    the tables of the state machines: which phase accepts which event, and what follows
    fields         the types of their fields, with limits
    codec          records to JSON and back, from those types alone
    reports        what a job tells people, as records: failures, stacks, its report, answers
    goodput        where the time of a job went: productive, and lost by cause
    job_history    what became of a job, from the records of an agent
    job_view       how a job is doing: its state, nodes, ranks, recoveries; `status.schema.json` says it of the file
    causes         the classes of what a failure is due to, by name
    role_policy    what becomes of an app when one of its roles ends; the variables by which roles find each other
    role_command   a replica's command where no supervisor starts it: waits for another role, and starts it again
    role_start     waits for another role before a replica starts
    policy         the grammar of `--on`: what a user wants to follow from a failure
    folders        removes them, of any depth
    foreign_files  reads files and JSON that anything may have written
    control        how commands and adapters ask a running job, and join the answers of its roles
    guard          the agent's parent: kills what is left when the agent ends, and fences when the lease expires
    processes      how programs are started, found and waited for; cores; system calls that Python lacks
    holder_socket  where agents that wait for jobs are reached
    preflight      what can be wrong with a node: the table of checks, and the reading of this machine
    gpus           reads the NVIDIA GPUs, through NVML
    ownership      whether another user could change or replace a file or folder
    programs       whether the program of a job exists, and installed packages
    debugger       pdb in one worker, at the terminal of its node's agent
    snapshot_file  the memory that holds snapshots: its layout, who writes what, how much of it there may be
    console        what a terminal shows of a job: lines of many ranks once, live rows at the bottom (a package)

Nothing here imports a room. `muster.worker` imports `contract`, `layouts` and, at a breakpoint, `debugger`.
`muster.snapshots` imports `snapshot_file`.
"""
