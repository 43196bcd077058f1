"""Runs a notebook from its first cell to its last with a real kernel, and prints what its cells show."""

import sys

import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=150, kernel_name="python3").execute()
for cell in notebook.cells:
    for output in cell.get("outputs", ()):
        print(output.get("text") or output["data"].get("text/plain"))
