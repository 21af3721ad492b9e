"""What the last passes run together: updates, copies of a bucket, and compute."""
