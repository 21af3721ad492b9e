"""Planning makes the programs of ranks that are not there, and says what they would take."""
