"""One batch over Ray: what crosses, who takes part, who fails, and what is done about it."""
