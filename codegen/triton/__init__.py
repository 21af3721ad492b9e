"""An update's kernel in Triton: its source, its expressions, its launch."""
