"""The algorithm across processes and machines: clients, cloud and channel as Ray actors.

`clients.py` is the seam of `airmoe_ray.moe` over Ray; `system.py` makes the actors, `supervisor.py` keeps them whole,
`orchestrator.py` puts requests through them.
"""
