"""How people reach AirMoE: the command line."""
