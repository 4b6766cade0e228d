"""Launches runs on this machine, as a process group. Imports as `launch` does."""
