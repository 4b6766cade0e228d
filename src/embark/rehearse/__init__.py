"""A job's own manifest, run on this machine before a cluster is paid for."""
