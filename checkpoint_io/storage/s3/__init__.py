"""S3 through the client of s3fs.

`store` is the entry point. `client` sends one request; `upload` and `download` move large objects
by such requests, in the sizes and within the memory that `parts` allows. `listing` lists and
deletes, `conditional` commits.
"""
