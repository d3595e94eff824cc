"""Helpers that are not about federations: messages, lazy imports, files, threads, tracing."""
