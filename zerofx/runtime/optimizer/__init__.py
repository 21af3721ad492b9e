"""Optimizer updates at run time, on the device and on the host."""
