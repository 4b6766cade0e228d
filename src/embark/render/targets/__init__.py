"""One file for each kind of target."""
