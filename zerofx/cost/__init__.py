"""What a program costs before it runs: bytes in memory, bytes on the wire, seconds."""
