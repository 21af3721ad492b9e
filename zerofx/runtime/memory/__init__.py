"""Flat memory: shards cut from whole tensors, pages, reused buffers."""
