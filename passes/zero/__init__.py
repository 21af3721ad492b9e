"""ZeRO itself: averaged gradients, buckets, and the passes that shard."""
