"""Tracing one parameter's update from the optimizer's own Python ``step``."""
