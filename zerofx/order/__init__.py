"""A happens-before checker: what a running step reads and writes, and what orders it.

``operators`` and ``hooks`` note what steps do; ``clocks`` find what nothing orders in it; ``check``
is the option ``check_order``.  They look at what waits for what and never at when something
happens: what happens to go well in one run is found too.
"""
