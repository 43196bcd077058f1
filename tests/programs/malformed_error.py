"""Writes an error file that no program should, another one in each attempt, and fails."""

import json
import os
import sys

DEEP = "[" * 1_000_000
NESTED = '{"message": ' * 200 + "1" + "}" * 200


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


path = os.environ["TORCHELASTIC_ERROR_FILE"]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
contents = [
    DEEP,
    NESTED,
    "5",
    json.dumps({"message": {"message": "E: t", "extraInfo": {"py_callstack": 5}}}),
    json.dumps({"message": {"message": {"a": [1]}, "extraInfo": 7}}),
    json.dumps({"message": {"message": "half \ud800 of a character", "extraInfo": {"py_callstack": "\ud800"}}}),
]
if attempt < len(contents):
    write(path, contents[attempt])
else:
    os.mkfifo(path)
sys.exit(3)
