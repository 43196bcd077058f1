"""The agent with a bug in its leader, which the first node that joins triggers."""
import sys

from muster.agent.rendezvous.leader import leader


def fail(*_args, **_keywords):
    raise TypeError("our own bug")


leader.decide = fail

from muster.agent.__main__ import main

sys.exit(main())
