"""How people reach AirMoE: HTTP and its page, metrics, and the command line.

http <- bench <- cli: each room imports only those before it.
"""
