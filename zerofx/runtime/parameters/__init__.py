"""Parameters between steps: shards, guards, buckets, first values, snapshots."""
