"""Ways in for those who train through another library, each an extra of its own."""
