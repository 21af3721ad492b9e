"""Passes that move states, shards and saved values to host memory and files."""
