"""The algorithm: query, FRLs, routing, experts, fusion; what the cloud computes and what a client computes."""
