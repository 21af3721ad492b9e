"""Communication between ranks: collectives, agreement, measurement."""
