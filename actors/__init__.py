"""The algorithm across processes and machines: clients, cloud and channel as Ray actors.

cluster <- rounds <- processes <- serving, training: each room imports only those before it. `rounds` is the seam of
`airmoe_ray.model.seam` over Ray.
"""
