"""Ways to agree, behind one protocol (`rendezvous.interface.Rendezvous`).

`selection` makes the one that `--rdzv-backend` names; muster's own is `member.member.Member`, and `shared_token` has a
token for nodes on one machine. `static` is a rendezvous
of one node with itself, `local_leader` its drains, and what people ask of it. `torch_handler` wraps torch's registry
(`c10d-torch`, `etcd`, ...): `torch_thread` owns the handler, `torch_watch` agrees on the end of a round through its
store, `torch_messages` has what passes between the two sides; `torch_caller` is for a handler that is an object of the
program that drives the agent.
`restart_policy` decides about failures where every agent has its own restart budget. `torch_plugin` is the other way
round: muster's rendezvous inside torchrun.
"""
