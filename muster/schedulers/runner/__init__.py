"""What the adapters adapt of TorchX: each fact about one of its two lines is here, once.

`versions` bridges the scheduler interface of 0.7 and nightly, `roles` does the same for roles and macros, `options`
parses `-cfg` strictly on both, `builtins` registers TorchX's own schedulers again, `waiting` and `interrupt` mend
`Runner.wait` and Ctrl-C.
"""
