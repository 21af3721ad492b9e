"""From the passes' program to a callable: folds, regions, operators bound to a runtime."""
