"""The captured engine: a step that the host only starts."""
