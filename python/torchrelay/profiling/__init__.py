"""Measures what the layers of a module take, one by one, and leaves everything as it was."""
