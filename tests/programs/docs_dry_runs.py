"""Runs each `torchx run` line of standard input as a dry run; prints what failed. Exit code 0 or 1.

Each in a fork: TorchX's command line is imported once, and remembers its arguments from one call to the next. What is
the same for all lines, the components and the agent's bundle, is read before.
"""

import functools
import os
import shlex
import sys
import tempfile
import traceback

import torchx.runner.api
from torchx.cli.main import main

from muster.schedulers.kubernetes.manifests import bundles

torchx.runner.api.get_component = functools.cache(torchx.runner.api.get_component)
bundles.build_agent_bundle = functools.cache(bundles.build_agent_bundle)
for component in ("dist.ddp", "dist.spmd"):
    torchx.runner.api.get_component(component)
bundles.build_agent_bundle()


def dry_run(words, output):
    """In a fork, never returns: the exit code of one dry run."""
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    code = 1
    try:
        main(["run", "--dryrun", *words])
        code = 0
    except SystemExit as end:
        code = int(end.code not in (0, None))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


failed = 0
for line in sys.stdin.read().splitlines():
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            dry_run(shlex.split(line)[2:], output)
        _, status = os.waitpid(child, 0)
        if status:
            failed = 1
            output.seek(0)
            print(f"{line}\n{output.read()}")
sys.exit(failed)
