"""Launches runs, records them and follows them, with one backend per platform. May import lint and below."""
