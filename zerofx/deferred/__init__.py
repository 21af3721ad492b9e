"""Models whose parameters are made later, one at a time."""
