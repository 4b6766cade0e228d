"""Launches runs, records them and tails their logs, with one backend per platform. May import lint and below."""
