"""Infrastructure on aws."""
