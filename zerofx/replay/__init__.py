"""Programs run again in one process: operators in plain torch, and validation."""
