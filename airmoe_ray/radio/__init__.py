"""The simulated radio: fading, noise and superposition, power control, and the ledger of bits and channel uses."""
