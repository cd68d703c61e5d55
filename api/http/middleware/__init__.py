"""ASGI middleware around every request: who may ask, keys and security headers, and counting."""
