"""Infrastructure on azure."""
