"""S3 through the client of s3fs, with obstore as a second engine for large objects.

`store` is the entry point. `client` sends one request; `upload` and `download` move large objects
by such requests, in the sizes and within the memory that `parts` allows, and `obstore` does the
same with the obstore package. `listing` lists and deletes, `conditional` commits.
"""
