"""Converts raw files to the prepared format; `prepare.prepare` is the entry point. Worker processes import only the
modules they need. May import data.prepared, store, spec and errors."""
