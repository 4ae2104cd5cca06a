"""What s3fs is told, said to obstore: the same store, credentials, timeouts and repetitions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib import import_module
from typing import Any

from checkpoint_io.storage.retry import RetryPolicy
from checkpoint_io.storage.s3.client import S3Client

# what concerns s3fs alone, or goes through the client that s3fs makes
_OWN = frozenset(
    {
        "anon", "asynchronous", "cache_regions", "config_kwargs", "client_kwargs",
        "default_block_size", "default_cache_type", "default_fill_cache", "endpoint_url",
        "fixed_upload_size", "key", "listings_expiry_time", "local_expiry_check", "loop",
        "max_concurrency", "max_paths", "password", "profile", "requester_pays",
        "s3_additional_kwargs", "secret", "session", "skip_instance_cache", "token",
        "use_listings_cache", "use_ssl", "username", "version_aware",
    }
)  # fmt: skip
_CLIENT = frozenset(
    {
        "aws_access_key_id", "aws_secret_access_key", "aws_session_token", "endpoint_url",
        "region_name", "use_ssl", "verify",
    }
)  # fmt: skip
_CONFIG = frozenset(
    {
        "connect_timeout", "max_pool_connections", "read_timeout", "region_name",
        "request_checksum_calculation", "response_checksum_validation", "retries", "s3",
    }
)  # fmt: skip
_S3 = frozenset({"addressing_style", "payload_signing_enabled"})
_EXTRA = {
    "ServerSideEncryption": "server_side_encryption",
    "SSEKMSKeyId": "sse_kms_key_id",
    "BucketKeyEnabled": "sse_bucket_key_enabled",
}


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that would be lost on the way to obstore."""
    config = options.get("config_kwargs") or {}
    for path, given, known in (
        ("", options, _OWN),
        ("client_kwargs.", options.get("client_kwargs") or {}, _CLIENT),
        ("config_kwargs.", config, _CONFIG),
        ("config_kwargs.s3.", config.get("s3") or {}, _S3),
        ("s3_additional_kwargs.", options.get("s3_additional_kwargs") or {}, frozenset(_EXTRA)),
    ):
        if unknown := sorted(set(given) - known):
            raise ValueError(
                f'storage_options: transfer="obstore" does not know {path}{unknown[0]}; '
                'leave it out or use transfer="fsspec"'
            )
    verify = (options.get("client_kwargs") or {}).get("verify")
    if verify not in (None, True, False):
        raise ValueError(
            'storage_options: transfer="obstore" takes True or False for client_kwargs.verify; '
            "it trusts the certificates of the system"
        )


def make_store(client: S3Client, options: Mapping[str, Any], policy: RetryPolicy) -> Any:
    """Make obstore's store for the bucket that the client talks to."""
    module: Any = import_module("obstore.store")
    meta = client.run(_meta(client))
    settings: dict[str, Any] = {"region": meta.region_name}
    explicit = options.get("endpoint_url") or "amazonaws.com" not in str(meta.endpoint_url)
    if explicit:
        settings["endpoint"] = meta.endpoint_url
    style = ((options.get("config_kwargs") or {}).get("s3") or {}).get("addressing_style")
    if style == "virtual" and not explicit:
        settings["virtual_hosted_style_request"] = True
    if options.get("requester_pays"):
        settings["request_payer"] = True
    for name, value in (options.get("s3_additional_kwargs") or {}).items():
        settings[_EXTRA[name]] = value
    more: dict[str, Any] = {}
    if options.get("anon"):
        settings["skip_signature"] = True
    else:
        more["credential_provider"] = _credentials(client)
    return module.S3Store(
        client.bucket,
        config=settings,
        client_options=_client_options(options, meta, policy),
        retry_config=_retry_config(policy),
        **more,
    )


async def _meta(client: S3Client) -> Any:
    """Return what the client of s3fs knows about itself."""
    return (await client.connected()).meta


def _client_options(options: Mapping[str, Any], meta: Any, policy: RetryPolicy) -> dict[str, Any]:
    """Return obstore's options of the connection."""
    # a request is a part of 16 MiB at most, for which twice the read timeout is allowed
    total = policy.connect_timeout + 2 * policy.read_timeout
    result: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=policy.connect_timeout),
        "timeout": timedelta(seconds=total),
    }
    if str(meta.endpoint_url).startswith("http://"):
        result["allow_http"] = True
    if (options.get("client_kwargs") or {}).get("verify") is False:
        result["allow_invalid_certificates"] = True
    return result


def _retry_config(policy: RetryPolicy) -> dict[str, Any]:
    """Return obstore's form of the policy."""
    return {
        "max_retries": policy.attempts - 1,
        "retry_timeout": timedelta(seconds=policy.deadline),
        "backoff": {
            "init_backoff": timedelta(seconds=policy.base_delay),
            "max_backoff": timedelta(seconds=policy.max_delay),
            "base": 2,
        },
    }


def _credentials(client: S3Client) -> Callable[[], dict[str, Any]]:
    """Return a function that gives obstore the credentials that s3fs has found, as of now."""

    def provide() -> dict[str, Any]:
        return client.run(_current(client))

    return provide


async def _current(client: S3Client) -> dict[str, Any]:
    """Ask the client of s3fs for its credentials, refreshed if they had to be."""
    signer = (await client.connected())._request_signer
    found = await signer._credentials.get_frozen_credentials()
    expires = getattr(signer._credentials, "_expiry_time", None)
    return {
        "access_key_id": found.access_key,
        "secret_access_key": found.secret_key,
        "token": found.token,
        "expires_at": expires,
    }
