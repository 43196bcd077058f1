"""The agent with a bug of our own in its leader, met by the first node that joins."""
import sys

from muster.agent.rendezvous.leader import leader


def fail(*_args, **_keywords):
    raise TypeError("our own bug")


leader.decide = fail

from muster.agent.__main__ import main

sys.exit(main())
