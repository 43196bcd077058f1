"""The agent as on a system without subreapers, death signals, shared timers and /proc: as on macOS."""
import sys

from muster._shared import processes

processes.LINUX = False

from muster.agent.__main__ import main

sys.exit(main())
