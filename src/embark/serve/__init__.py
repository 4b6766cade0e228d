"""Scores of an exported model: of files in bulk, and over HTTP. May import trainers, export and below."""
