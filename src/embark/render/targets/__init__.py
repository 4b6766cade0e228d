"""One module for each kind of target."""
