"""What is not about federations: words of messages, names imported late, files, threads, tracing."""
