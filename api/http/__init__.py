"""The HTTP front end: FastAPI around the orchestrator, the page, and metrics."""
