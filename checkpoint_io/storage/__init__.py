"""Storage backends: local disks, S3, and everything else that fsspec reaches."""
