"""Ways to agree, behind one protocol (`rendezvous.interface.Rendezvous`).

`selection` makes the one that `--rdzv-backend` names. `static` is a rendezvous of one node with itself,
`torch_handler` wraps torch's registry (`c10d-torch`, `etcd`, ...), `restart_policy` judges failures where every agent
keeps its own budget. muster's own backend is `member.member.Member`. `torch_plugin` is the other way round: muster's
rendezvous inside torchrun.
"""
