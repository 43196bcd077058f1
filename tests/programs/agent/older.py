"""The agent as it was before joins carried the job's rules: it speaks version 1 of the protocol."""
import sys

from muster.agent.rendezvous.protocol import framing

framing.VERSION = 1

from muster.agent.__main__ import main

sys.exit(main())
