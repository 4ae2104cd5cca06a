"""What an error of an S3 client means: try again, or say what to check."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from checkpoint_io.errors import CheckpointError, CheckpointNotFoundError

_TRANSIENT_CODES = frozenset(
    {
        "BadDigest", "BandwidthLimitExceeded", "IncompleteBody", "InternalError", "InvalidDigest",
        "OperationAborted", "RequestLimitExceeded", "RequestThrottled",
        "RequestThrottledException", "RequestTimeout", "RequestTimeoutException",
        "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException",
        "TooManyRequestsException", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch",
    }
)  # fmt: skip
_TRANSIENT_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
_WRONG_KEYS = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken"})
_ELSEWHERE = frozenset(
    {
        "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect",
        "301", "307",
    }
)  # fmt: skip
_NO_CREDENTIALS = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"}
)


class StoreAccessError(CheckpointError, PermissionError):
    """The store refuses what was asked of it, and will do so again."""


class StoreUnavailableError(CheckpointError, OSError):
    """The store did not answer well within the bound of the tries."""


@dataclass(frozen=True)
class Place:
    """Where a request went, for errors."""

    bucket: str
    endpoint: str

    def of(self, key: str | None) -> str:
        """Name an object, or the bucket."""
        return f"s3://{self.bucket}/{key}" if key else f"s3://{self.bucket}"


def code_of(error: BaseException) -> str:
    """Return the error code of the store, "" for an error that is none of its answers."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def status_of(error: BaseException) -> int:
    """Return the HTTP status of the store's answer, 0 if there was no answer."""
    response = getattr(error, "response", None)
    metadata = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    return int(metadata.get("HTTPStatusCode") or 0)


def is_absent(error: BaseException) -> bool:
    """Say whether an answer means that there is no such object."""
    return code_of(error) in ("NoSuchKey", "404", "NotFound")


def lost_condition(error: BaseException) -> bool:
    """Say whether a conditional request was refused because of its condition."""
    return status_of(error) in (409, 412)


def is_transient(error: Exception) -> bool:
    """Say whether the same request may succeed later."""
    if code := code_of(error):
        return code in _TRANSIENT_CODES or status_of(error) in _TRANSIENT_STATUS
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return False
    return isinstance(error, (asyncio.TimeoutError, *_wire_errors()))


def _wire_errors() -> tuple[type[BaseException], ...]:
    """Return the errors of the layers between the store's answers and us."""
    import aiohttp
    from botocore import exceptions, parsers

    return (
        TimeoutError,
        ConnectionError,
        EOFError,
        aiohttp.ClientError,
        exceptions.ConnectionError,
        exceptions.HTTPClientError,
        exceptions.IncompleteReadError,
        exceptions.ResponseStreamingError,
        parsers.ResponseParserError,
    )


def explain(error: Exception, doing: str, place: Place, key: str | None, tried: str) -> Exception:
    """Return the error to raise in place of a client's: what went wrong, and what to check."""
    if isinstance(error, (CheckpointError, MemoryError, ValueError)):
        return error
    code = code_of(error)
    where = f"{doing} {place.of(key)} at {place.endpoint} failed"
    said = f"{code}: {_message(error)}" if code else f"{type(error).__name__}: {error}"
    if code == "NoSuchBucket":
        return CheckpointNotFoundError(
            f"{where}: there is no bucket {place.bucket!r}; check its name, the region and "
            "endpoint_url"
        )
    if is_transient(error):
        return StoreUnavailableError(f"{where}, {tried}: {said}; check the store and the network")
    if advice := _advice(error, code):
        return StoreAccessError(f"{where}: {said}; {advice}")
    return CheckpointError(f"{where}: {said}")


def _message(error: Exception) -> str:
    """Return the text of the store's answer."""
    response: Any = getattr(error, "response", {})
    return str(response.get("Error", {}).get("Message", ""))


def _advice(error: Exception, code: str) -> str:
    """Say what to check where access is refused; "" for other errors."""
    if type(error).__name__ in _NO_CREDENTIALS:
        return "set the environment, the configuration files or storage_options (key, secret)"
    if code in _EXPIRED:
        return "the credentials have expired: get new ones and start again"
    if code in _WRONG_KEYS:
        return "the access key, its secret or the session token is wrong"
    if code == "RequestTimeTooSkewed":
        return "set the clock of this machine"
    if code in _ELSEWHERE:
        region = f"{{'region_name': {_region(error)}}}"
        return f"the bucket is in another region: give client_kwargs={region}"
    if status_of(error) in (401, 403):
        return (
            "check the credentials and their rights to list the bucket and to put, get and delete "
            "objects there"
        )
    return ""


def _region(error: Exception) -> str:
    """Return the region that the answer names, as a Python literal."""
    response: Any = getattr(error, "response", {})
    headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region = headers.get("x-amz-bucket-region") or response.get("Error", {}).get("Region")
    return repr(region) if region else "..."
