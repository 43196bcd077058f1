"""What a link carries: any message of any direction. Each receiver reads the union of those that it expects."""

from muster.agent.rendezvous.protocol.discovery_messages import AnnouncementAnswer, FirstMessage, QueryAnswer
from muster.agent.rendezvous.protocol.leader_messages import LeaderMessage
from muster.agent.rendezvous.protocol.member_messages import MemberMessage

Message = MemberMessage | LeaderMessage | FirstMessage | QueryAnswer | AnnouncementAnswer
