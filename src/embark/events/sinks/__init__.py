"""Where events go besides the run's own file."""
