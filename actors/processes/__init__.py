"""What runs in an actor of its own: cloud, channel, hosts of clients."""
