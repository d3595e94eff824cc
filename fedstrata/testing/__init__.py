"""Small cases for tests of methods and engines, in the project and outside of it."""
