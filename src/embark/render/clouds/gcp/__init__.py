"""Infrastructure on gcp."""
