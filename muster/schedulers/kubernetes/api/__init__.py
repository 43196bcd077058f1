"""Requests to the API server.

`connection` finds the cluster and the credentials, and `client` sends requests with retries and limits. `objects`
creates, reads and lists objects as plain dicts. `execution` runs a command in a pod, and `errors` explains a
refusal in one line that says what to do.
"""
