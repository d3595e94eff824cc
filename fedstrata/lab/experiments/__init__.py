"""What experiments are defined with, and what runs them."""
