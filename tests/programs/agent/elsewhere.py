"""The agent as on a system without subreapers, death signals, timers to share and /proc: as on macOS."""
import sys

from muster import _processes

_processes.LINUX = False

from muster.agent.__main__ import main

sys.exit(main())
