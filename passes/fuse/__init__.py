"""The last passes, which let things run together: updates, copies of a bucket, compute."""
