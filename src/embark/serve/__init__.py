"""Scores of an exported model: of files in bulk, and over HTTP and gRPC. May import trainers, export and below."""
