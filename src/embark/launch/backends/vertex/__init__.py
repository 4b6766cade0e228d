"""Launches runs on Vertex AI, as CustomJobs. Imports as `launch` does."""
