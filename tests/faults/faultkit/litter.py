"""What a folder or a bucket holds beside what its manifest names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoint_io import read_manifest


def litter(place: Path) -> set[str]:
    """Names in a checkpoint's folder that its manifest does not name."""
    named = {"manifest.json", *(entry.name for entry in read_manifest(place).files)}
    return {path.name for path in place.iterdir()} - named


def keys_below(server: Any, prefix: str) -> set[str]:
    """Names of the objects below a prefix, asked of the server past every cache of ours."""
    pages = server.client().get_paginator("list_objects_v2")
    found = pages.paginate(Bucket=server.bucket, Prefix=f"{prefix}/")
    return {
        item["Key"].removeprefix(f"{prefix}/")
        for page in found
        for item in page.get("Contents", ())
    }


def uploads_below(server: Any, prefix: str) -> list[str]:
    """Keys of the multipart uploads that hang below a prefix."""
    answer = server.client().list_multipart_uploads(Bucket=server.bucket)
    keys = [upload["Key"] for upload in answer.get("Uploads", ())]
    return [key for key in keys if key.startswith(f"{prefix}/")]


def litter_s3(server: Any, prefix: str) -> set[str]:
    """Objects and dangling uploads that the manifest below a prefix does not name."""
    manifest = read_manifest(server.url(prefix), storage_options=server.options)
    named = {"manifest.json", *(entry.name for entry in manifest.files)}
    uploads = {f"upload of {key}" for key in uploads_below(server, prefix)}
    return (keys_below(server, prefix) - named) | uploads
