"""The verifier: the invariants of a program, checked before and after every pass."""
