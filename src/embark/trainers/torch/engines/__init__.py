"""The engines of the torch trainer."""
