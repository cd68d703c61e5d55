"""Training on Ray: Ray Train's workers, clients that learn in their own actors, features by a pool."""
