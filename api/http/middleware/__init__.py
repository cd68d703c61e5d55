"""ASGI middleware around every request: keys and security headers, and counting."""
