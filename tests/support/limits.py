"""How long a test waits for what must come."""

HANG_S = 1200.0
"""Then it fails and says what did not come, before pytest's own limit (pyproject.toml) ends its worker. It measures
nothing: no machine is so busy."""
