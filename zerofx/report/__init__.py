"""Programs as text, tables and timelines, written to dump folders and read back."""
