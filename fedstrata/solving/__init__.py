"""The loop over rounds: arguments posed, rounds run, results kept."""
