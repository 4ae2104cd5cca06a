"""S3 through the client of s3fs; obstore may move the bytes of large objects.

`store` is the entry point. `client` sends one request; `upload` and `download` move large objects
by such requests, in the sizes and within the memory that `parts` allows, and `obstore` does the
same with the obstore package. `listing` lists and deletes, `conditional` commits.

obstore is no engine of its own: it neither lists nor aborts the uploads that a killed process left,
sends no checksum that the store verifies, hangs in a forked process, knows no profiles, and tells
what failed by text alone.
"""
