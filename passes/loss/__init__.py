"""Passes over the end of forward: the loss."""
