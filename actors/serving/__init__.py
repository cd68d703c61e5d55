"""A served run: its actors, their health, requests in and results out."""
