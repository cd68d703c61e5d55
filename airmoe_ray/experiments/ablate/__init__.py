"""One setting at a time: the paper's five sweeps, and any other."""
