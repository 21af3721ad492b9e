"""What a training will take on ranks that are not there: its programs, made in one process."""
