"""What the paper computes and compares, each experiment in a folder of its own."""
