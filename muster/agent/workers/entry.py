"""The file that the interpreter runs in a worker: it runs `program` from its compiled form.

The interpreter compiles the file that it is given each time. Compiling all of `program` would cost every cold worker 5
ms.
"""

import sys

if __name__ == "__main__":
    _path = __file__[: -len("entry.py")] + "program.py"
    _loader = sys.modules["_frozen_importlib_external"].SourceFileLoader("program", _path)
    _program = type(sys)("program")
    _program.__file__ = _path
    exec(_loader.get_code("program"), _program.__dict__)  # noqa: S102  # our own code
    _program.main(sys.argv[2:])
