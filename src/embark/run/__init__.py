"""The life of a run, whichever library trains."""
