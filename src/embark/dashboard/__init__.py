"""The live page and the live terminal view: read runs as they grow, and show them. May import report and below."""
