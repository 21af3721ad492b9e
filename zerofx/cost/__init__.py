"""The cost of a program before it runs: bytes in memory, bytes on the wire, seconds."""
