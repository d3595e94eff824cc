"""The classes that define experiments, and the code that runs them."""
