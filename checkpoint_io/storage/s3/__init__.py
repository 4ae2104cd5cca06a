"""S3 through the client of s3fs.

`store` is the entry point. `client` sends one request; `upload` and `download` move large objects
by such requests, in the sizes and within the memory that `parts` allows. `listing` lists and
deletes, `conditional` commits.

A conditional put whose answer was lost may have taken effect, so the object is looked at before it
is put again. Uploads carry checksums that S3 verifies on arrival; what is read is verified by the
manifest. A store that ignores conditions or checksums is found out by a probe, once for a bucket.
"""
