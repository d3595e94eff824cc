"""Methods for a problem, and the quality of results."""
