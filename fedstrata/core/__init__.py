"""The contract: what problems, methods, engines and data agree on."""
