"""Files shipped inside the package: weights of the embedded backbone."""
