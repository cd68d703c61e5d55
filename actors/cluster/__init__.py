"""The Ray cluster: how to reach it, which host goes to which node, and room for all of them."""
