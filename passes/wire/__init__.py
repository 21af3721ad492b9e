"""Passes that decide in how many bits values travel."""
