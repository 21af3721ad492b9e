"""Passes that decide which values are kept, and which are computed or gathered again."""
