"""End-to-end training through the channel: losses, one step, runs and their folders."""
