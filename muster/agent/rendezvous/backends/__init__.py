"""Rendezvous without a network, and what stands around the others.

`static` is a rendezvous of one node with itself, `local_leader` its drains, and what people ask of it.
`restart_policy` decides about failures where every agent has its own restart budget: here, and with torch's handlers.
`shared_token` has a token for nodes on one machine.

What is not here: muster's own rendezvous of several nodes (`member.member.Member`), and torch's (`torch_handlers`).

From outside, import `static`, `restart_policy` and `shared_token`.
"""
