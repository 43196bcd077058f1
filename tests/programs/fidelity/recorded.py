"""torch's own @record, alone and around a richer handler."""

import sys

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record


class Rich(ErrorHandler):
    def record_exception(self, e):
        with open(self._get_error_file_path(), "w") as file:
            file.write('{"message": "written by the user\'s handler"}')


handler = Rich() if "rich" in sys.argv else None


def main():
    if "exit" in sys.argv:
        sys.exit(6)
    raise ValueError("recorded")


record(main, error_handler=handler)()
