"""What can be said of a job from the records that its agents have written: `muster events` and `muster timeline`.

`events.schema.json` declares the records, also for readers of other programs. `sources` finds and parses them, and
`clocks` puts the records of all agents on the leader's clock. `story` derives what happened: nodes, rounds, phases,
failures, recoveries, steps and where the time went. `sentences` says it in three sentences. `page` draws it as one HTML
page, from `page.html`, `page.css` and `page.js`. `commands` has the two commands. `log_folder` reads how a job is doing
from its log folder, for `muster status` and `muster top`.

From outside, import `commands`, `log_folder`, and to read records `sources`.
"""
