"""The `airmoe` command: one module per verb, `main.py` is the table of contents."""
