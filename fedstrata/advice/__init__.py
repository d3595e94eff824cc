"""What fits a problem, and how good a result is."""
