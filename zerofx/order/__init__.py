"""A happens-before checker: what a running step reads and writes, and what orders it.

``operators`` and ``hooks`` note a ``history`` while steps run; ``judge`` finds what nothing orders
in it; ``check`` is the option ``check_order``.  It looks at what waits for what and never at when
something happens, so that one run shows what another would only compute wrongly.
"""
