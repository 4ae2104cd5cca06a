"""S3: one store over s3fs's client, with obstore as another engine."""
