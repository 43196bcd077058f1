import json, os, sys

sys.stdout.write(
    json.dumps(
        {
            "argv": sys.argv,
            "name": __name__,
            "file": __file__,
            "path0": sys.path[0],
            "unbuffered": bool(getattr(sys.stdout, "write_through", False)),
            "env": dict(os.environ),
        }
    )
    + "\n"
)
