"""Scores of an exported model: of files in bulk. May import trainers, export and below."""
