"""Destinations of events besides the run's own file. Imports as `events` does."""
