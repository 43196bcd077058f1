"""`muster top`: looks at a job, or at all of them, while they run. rich draws it: the extra `top` of the package.

| module      | what                                                                                  |
|---          |---                                                                                    |
| `command`   | the command: which form it has, its exit code; a line per change without a terminal   |
| `app`       | the loop of keys and frames, on a terminal; the page of who waits for whom            |
| `state`     | which key does what; pure                                                             |
| `rendering` | from a picture to rows, with rich; pure                                               |
| `picture`   | what is shown, as it was read, and in which order                                     |
| `agent_requests` | reads and asks the schedulers, in threads                                         |
| `screen`    | the terminal: alternate screen, size, Ctrl-Z, the end                                 |
| `keys`      | from bytes to keys; pure                                                              |

From outside, import `command`.
"""
