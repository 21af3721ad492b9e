"""The functions that a lowered program calls: collectives, agreement, memory."""
