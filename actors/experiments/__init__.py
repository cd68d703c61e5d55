"""Many runs on a cluster: comparisons and sweeps."""
