"""Launches runs on a Ray cluster, through its Jobs API. Imports as `launch` does."""
