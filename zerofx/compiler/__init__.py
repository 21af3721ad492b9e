"""One compiled program: capture, passes, agreement, lowering, first call."""
