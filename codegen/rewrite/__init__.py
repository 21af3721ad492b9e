"""Rewrites of a traced update: storage, gradients, flat shards, whole tensors."""
