"""Loaders of data sets: bundled with scikit-learn or this package, or fetched once."""
