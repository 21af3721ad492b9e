"""Passes that decide when communication starts and updates run."""
