"""The API server: how it is reached and asked.

`connection` finds the cluster and the credentials, `client` sends requests with retries and limits, `objects` creates,
reads, lists and watches objects as plain dicts, `errors` puts refusals into one line that says what to do.
"""
