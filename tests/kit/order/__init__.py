"""A happens-before checker: what a step reads and writes, on which streams, ordered by what.

CPU tensors stand for a device's memory, and everything runs at once, so that results stay right.
``watch`` notes a ``history`` while steps run; ``judge`` finds what nothing orders in it, also with
waits left out (``plants``).
"""
