"""The base of the agent: the loop with its timers, the clock, signals, and the event log.

`loop` is the selector of the agent's one thread, with the injected time. It runs in other threads what may block.
`signals` turns signals and children's ends into calls on the loop (what follows is decided in `node.decisions`).
`event_log` writes one record per transition (`events.jsonl`, `--event-log-handler`). `ports` reserves ports.
`persistent` has mappings and sets whose next version costs no copy. Records are in `muster._shared.records`. `limits`
says after what time something counts as lost, late or hung.

Nothing here knows the rest of the agent, so all of the agent may import from here.

From outside, import any module.
"""
