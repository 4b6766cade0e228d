"""What differs between the clouds."""
