"""Seconds that the server and whoever stops it must agree on."""

DRAIN_S = 30  # After SIGTERM, until every accepted request is answered.
