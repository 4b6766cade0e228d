"""One module per destination of events besides the run's own file. Imports as `events` does."""
