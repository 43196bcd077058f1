"""Writes its node's number to the end of the file ORDER, as soon as it runs."""

import os

fd = os.open(os.environ["ORDER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
os.write(fd, f"{os.environ['NODE']}\n".encode())
