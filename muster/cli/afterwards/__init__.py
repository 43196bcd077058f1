"""What can be said of a job from the records that its agents have written: `muster events` and `muster timeline`.

`event_kinds` declares the records, `events.schema.json` says it as a JSON schema. `sources` finds and parses them,
`clocks` puts the records of all agents on the leader's clock. `story` makes of them what happened: nodes, rounds,
phases, failures, recoveries, steps and where the time went. `sentences` says it in three. `page` draws that as one HTML
page, of `page.html`, `page.css` and `page.js`. `perfetto` writes it as a trace. `commands` has the two commands.

From outside, import `commands`, and to read records `event_kinds`.
"""
