"""What a lowered program calls while it runs: collectives, rank agreement, memory."""
