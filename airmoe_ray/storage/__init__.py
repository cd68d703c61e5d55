"""Models on disk: the checkpoint folder and what its card says."""
