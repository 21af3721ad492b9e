"""Memory that is not on the device: host buffers, copies, files."""
