"""The algorithm across processes and machines. Nothing lives here yet: `airmoe_ray` runs whole in one process."""
