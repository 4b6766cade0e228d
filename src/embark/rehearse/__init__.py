"""Runs a job's own manifest on this machine, with the restarts and faults of a cluster, before a GPU is paid for. May
import diagnose and below."""
