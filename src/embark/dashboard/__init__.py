"""The live page and the live terminal view: they read runs as they grow. May import report and below."""
