"""Runs of steps under the checker of ``zerofx.order``, on what stands for a device.

CPU tensors stand for a device's memory, and everything runs at once, so that results stay right.
``watching`` notes a ``history`` while steps run; ``plants`` finds what nothing orders in it, also
with waits left out.
"""
