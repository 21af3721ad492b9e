"""Values in fewer bits, for their way to other ranks."""
