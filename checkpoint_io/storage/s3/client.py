"""Requests to S3 through the client of s3fs: timeouts, retries, errors and bodies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit, urlunsplit

from aiohttp.payload import Payload

from checkpoint_io.errors import CheckpointError, CheckpointNotFoundError
from checkpoint_io.storage.retry import TRANSIENT_STATUS, Attempts, RetryPolicy
from checkpoint_io.threads import ThreadForEach

T = TypeVar("T")

STEP = 16 << 20  # bytes for which `read_timeout` seconds are allowed; also the usual part size
_CONNECTIONS = 32
_SLICE = 512 << 10
_SLICED_FROM = 1 << 20
_TRANSIENT_CODES = frozenset(
    {
        "BadDigest", "BandwidthLimitExceeded", "IncompleteBody", "InternalError", "InvalidDigest",
        "OperationAborted", "RequestLimitExceeded", "RequestThrottled",
        "RequestThrottledException", "RequestTimeout", "RequestTimeoutException",
        "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException",
        "TooManyRequestsException", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch",
    }
)  # fmt: skip
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
_WRONG_KEYS = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken"})
_WRONG_REGION = frozenset(
    {
        "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect",
        "301", "307",
    }
)  # fmt: skip
_FIELDS = {  # that each answer has
    "create_multipart_upload": "UploadId",
    "get_object": "ETag",
    "head_object": "ETag",
    "upload_part": "ETag",
}
_NO_STORE = (
    "what answers there is not the store, but perhaps a proxy, a sign-in page or another port: "
    "give the endpoint_url of the store itself"
)
_NO_CREDENTIALS = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"}
)


class S3Client:
    """Requests to one bucket, from any thread, of this process or of a forked child."""

    def __init__(
        self, bucket: str, endpoint: str, policy: RetryPolicy, make: Callable[[bool], Any]
    ) -> None:
        self.bucket = bucket
        self.policy = policy
        self.place = Place(bucket, endpoint)
        self._make = make
        self._pid = -1
        self._filesystem: Any = None

    @property
    def filesystem(self) -> Any:
        """Return the s3fs filesystem of this process."""
        # the parent's event loop thread and its connections do not survive a fork
        if self._pid != os.getpid():
            self._filesystem = self._make(False)
            self._pid = os.getpid()
            _outlive_executors(self.loop)
        return self._filesystem

    def reconnect(self) -> None:
        """Send later requests over new connections, with a filesystem that nobody else uses."""
        if self._pid == os.getpid():
            self._filesystem = self._make(True)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop on which the requests run."""
        loop: asyncio.AbstractEventLoop = self._filesystem.loop
        return loop

    def start(self, work: Coroutine[Any, Any, T]) -> Any:
        """Start a coroutine on the loop; return its concurrent future."""
        _ = self.filesystem  # creates the loop
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it; an interrupt cancels it."""
        future = self.start(work)
        try:
            result: T = future.result()
            return result
        except BaseException:
            future.cancel()
            raise

    async def connected(self) -> Any:
        """Return the botocore client for the bucket."""
        filesystem = self.filesystem
        await filesystem.set_session()
        client = await filesystem.get_s3(self.bucket)
        refuse_redirects(client)
        return client

    def body(self, data: bytes | bytearray) -> Any:
        """Return a request body; large ones are sent in slices, if the client uses aiohttp."""
        other = (self.filesystem.config_kwargs or {}).get("http_session_cls") is not None
        return data if other or len(data) < _SLICED_FROM else _SlicedBody(data)

    async def once(self, operation: str, step: float = 1.0, **arguments: Any) -> Any:
        """Send one request once; it may take `step` times the read timeout."""
        filesystem = self.filesystem
        method = getattr(await self.connected(), operation)
        # adds the options of s3fs that this operation takes, such as RequestPayer
        known = filesystem._get_s3_method_kwargs(
            method, filesystem.req_kw, Bucket=self.bucket, **arguments
        )
        bound = self.policy.connect_timeout + step * self.policy.read_timeout
        try:
            answer = await asyncio.wait_for(method(**known), bound)
        except Exception as error:  # that of the wire, around ours
            if isinstance(error.__context__, WrongAnswer):
                raise error.__context__ from None
            raise
        check_answer(operation, answer)
        return answer

    async def repeat(
        self,
        doing: str,
        key: str | None,
        action: Callable[[], Awaitable[T]],
        policy: RetryPolicy | None = None,
    ) -> T:
        """Run an action until it succeeds; retry transient errors within the policy.

        Other errors are raised unchanged, so that the caller can interpret them.
        """
        attempts = Attempts(policy or self.policy)
        while True:
            try:
                return await action()
            except Exception as error:
                if not is_transient(error):
                    raise
                pause = attempts.pause()
                if pause is None:
                    raise self.explain(error, doing, key, attempts.describe()) from error
                await asyncio.sleep(pause)

    async def request(
        self, operation: str, doing: str, key: str | None = None, **arguments: Any
    ) -> Any:
        """Send a request that may be retried; errors name the cause and what to check."""
        if key is not None:
            arguments["Key"] = key
        return await self.repeat_explained(doing, key, lambda: self.once(operation, **arguments))

    async def repeat_explained(
        self, doing: str, key: str | None, action: Callable[[], Awaitable[T]]
    ) -> T:
        """Run an action as `repeat` does; errors name the cause and what to check."""
        try:
            return await self.repeat(doing, key, action)
        except Exception as error:
            self.raise_explained(error, doing, key)

    def explain(
        self, error: Exception, doing: str, key: str | None, tried: str = "tried once"
    ) -> Exception:
        """Return the error to raise in place of the client's: the cause, and what to check."""
        failure = f"{doing} {self.place.of(key)} at {self.place.endpoint} failed"
        if isinstance(error, WrongAnswer):
            return WrongServerError(f"{failure}: {error}; {_NO_STORE}")
        if isinstance(error, (CheckpointError, MemoryError, ValueError)):
            return error
        code = code_of(error)
        text = f"{code}: {_message(error)}" if code else f"{type(error).__name__}: {error}"
        if code == "NoSuchBucket":
            return CheckpointNotFoundError(
                f"{failure}: there is no bucket {self.bucket!r}; check its name, the region and "
                "endpoint_url"
            )
        if is_transient(error):
            return StoreUnavailableError(
                f"{failure}, {tried}: {text}; check the store and the network"
            )
        if advice := _advice(error, code):
            return StoreAccessError(f"{failure}: {text}; {advice}")
        return CheckpointError(f"{failure}: {text}")

    def raise_explained(self, error: Exception, doing: str, key: str | None) -> NoReturn:
        """Raise the error that explains this one, or this one if it says enough."""
        explained = self.explain(error, doing, key)
        if explained is error:  # an error must not be its own cause
            raise error
        raise explained from error

    async def read(self, key: str) -> tuple[bytes, str]:
        """Return the content of a small object and its entity tag."""

        async def get() -> tuple[bytes, str]:
            answer = await self.once("get_object", Key=key)
            body = answer["Body"]
            step = 1 + int(answer.get("ContentLength") or 0) / STEP
            async with body:
                data = await asyncio.wait_for(body.read(), step * self.policy.read_timeout)
            return bytes(data), str(answer.get("ETag", ""))

        return await self.repeat("reading", key, get)


def refuse_redirects(client: Any) -> None:
    """Let redirects of a botocore client be errors; aiohttp would follow them to any host."""
    session: Any = getattr(getattr(client, "_endpoint", None), "http_session", None)
    get = getattr(session, "_get_session", None)  # only the session on aiohttp has one
    if get is not None and not isinstance(get, _DirectSessions):
        session._get_session = _DirectSessions(get)


class _DirectSessions:
    """The function that returns the session of aiohttp, for requests that are not sent on."""

    def __init__(self, get: Callable[[Any], Awaitable[Any]]) -> None:
        self._get = get

    async def __call__(self, proxy: Any) -> _DirectSession:
        return _DirectSession(await self._get(proxy))


class _DirectSession:
    """A session of aiohttp that follows no redirect."""

    def __init__(self, session: Any) -> None:
        self._session = session

    async def request(self, method: str, **options: Any) -> Any:
        """Send a request; raise WrongAnswer if it is redirected."""
        answer = await self._session.request(method, allow_redirects=False, **options)
        target = answer.headers.get("location")
        # botocore itself goes to the region that an answer names, on the hosts of the endpoint
        if target and answer.status // 100 == 3 and "x-amz-bucket-region" not in answer.headers:
            answer.release()
            raise WrongAnswer(
                f"the answer is a redirect to {shown_url(target)}, which is not followed"
            )
        return answer


def check_answer(operation: str, answer: Mapping[str, Any]) -> None:
    """Raise WrongAnswer if an answer cannot be that of a store, though its status is 200."""
    metadata = answer.get("ResponseMetadata", {})
    headers = metadata.get("HTTPHeaders", {})
    is_page = str(headers.get("content-type", "")).lower().startswith("text/html")
    # a page that somebody keeps in a bucket has a tag, and some stores call all they say a page
    if is_page and not headers.get("etag") and not metadata.get("RequestId"):
        raise WrongAnswer("the answer is a web page (text/html)")
    field = _FIELDS.get(operation)
    if field is not None and not answer.get(field):
        raise WrongAnswer(f"the answer has no {field}")


def _outlive_executors(loop: asyncio.AbstractEventLoop) -> None:
    """Keep DNS lookups working while the interpreter waits for a thread that still saves."""
    # asyncio resolves names in a ThreadPoolExecutor, which refuses work at interpreter shutdown
    if getattr(loop, "_default_executor", None) is None:
        loop.call_soon_threadsafe(loop.set_default_executor, ThreadForEach())


def configured(
    options: Mapping[str, Any], policy: RetryPolicy
) -> tuple[dict[str, Any], RetryPolicy]:
    """Return s3fs options and the policy, each completed from the other.

    Timeouts and `retries` of the caller's `config_kwargs` override the policy, and the client's own
    retries are disabled, so that ours are the only ones.
    """
    result = dict(options)
    config = dict(result.get("config_kwargs") or {})
    retries = config.pop("retries", None) or {}
    attempts = retries.get("total_max_attempts") or retries.get("max_attempts", -1) + 1
    policy = RetryPolicy(
        attempts or policy.attempts,
        policy.base_delay,
        policy.max_delay,
        policy.deadline,
        config.setdefault("connect_timeout", policy.connect_timeout),
        config.setdefault("read_timeout", policy.read_timeout),
    )
    config["retries"] = {"total_max_attempts": 1}
    config.setdefault("max_pool_connections", _CONNECTIONS)
    if sends_checksums(options):
        if _may_leave_unsigned(options):
            # a checksum in a signed header protects the body; signing it would hash it once more
            config["s3"] = {"payload_signing_enabled": False, **(config.get("s3") or {})}
        config.update(_quiet_checksums())
    result["config_kwargs"] = config
    return result, policy


def sends_checksums(options: Mapping[str, Any]) -> bool:
    """Return whether uploads carry checksums: unless botocore's setting is "when_required"."""
    config = options.get("config_kwargs") or {}
    name = "request_checksum_calculation"
    asked = config.get(name) or os.environ.get(f"AWS_{name.upper()}") or ""
    return str(asked).lower() != "when_required"


def _may_leave_unsigned(options: Mapping[str, Any]) -> bool:
    """Return whether the store accepts unsigned bodies; AWS does so only over https."""
    client = options.get("client_kwargs") or {}
    endpoint = str(options.get("endpoint_url") or client.get("endpoint_url") or "")
    plain = endpoint.startswith("http://") or not options.get("use_ssl", True)
    return not (plain and (not endpoint or "amazonaws.com" in endpoint))


def _quiet_checksums() -> dict[str, str]:
    """Return the options that keep botocore from adding checksums to ours, if it has them."""
    from botocore.config import Config

    names = ("request_checksum_calculation", "response_checksum_validation")
    return {name: "when_required" for name in names if name in Config.OPTION_DEFAULTS}


class StoreAccessError(CheckpointError, PermissionError):
    """The store denies access, and will do so again."""


class WrongServerError(CheckpointError, OSError):
    """What answered is not the store."""


class WrongAnswer(Exception):
    """An answer that no store gives; `explain` turns it into a WrongServerError."""


class StoreUnavailableError(CheckpointError, OSError):
    """The store did not answer correctly within the bounds of the retries."""


@dataclass(frozen=True)
class Place:
    """Bucket and endpoint of a request, for error messages."""

    bucket: str
    endpoint: str

    def __post_init__(self) -> None:
        """Remove user and password from the endpoint."""
        object.__setattr__(self, "endpoint", shown_url(self.endpoint))

    def of(self, key: str | None) -> str:
        """Return the URL of an object, or of the bucket."""
        return f"s3://{self.bucket}/{key}" if key else f"s3://{self.bucket}"


def shown_url(url: str) -> str:
    """Return a URL without what may be secret: user, password, query and fragment."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def code_of(error: BaseException) -> str:
    """Return the error code of the store's answer, "" if the error is not from an answer."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def status_of(error: BaseException) -> int:
    """Return the HTTP status of the store's answer, 0 if there was no answer."""
    response = getattr(error, "response", None)
    metadata = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    return int(metadata.get("HTTPStatusCode") or 0)


def is_absent(error: BaseException) -> bool:
    """Return whether an answer means that there is no such object."""
    return code_of(error) in ("NoSuchKey", "404", "NotFound")


def lost_condition(error: BaseException) -> bool:
    """Return whether a conditional request was refused because of its condition."""
    return status_of(error) in (409, 412)


def is_transient(error: Exception) -> bool:
    """Return whether the same request may succeed later."""
    if code := code_of(error):
        return code in _TRANSIENT_CODES or status_of(error) in TRANSIENT_STATUS
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return False
    return isinstance(error, (asyncio.TimeoutError, *_wire_errors()))


def _wire_errors() -> tuple[type[BaseException], ...]:
    """Return the error types of the layers below the store's answers."""
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


def _message(error: Exception) -> str:
    """Return the text of the store's answer."""
    response: Any = getattr(error, "response", {})
    return str(response.get("Error", {}).get("Message", ""))


def _advice(error: Exception, code: str) -> str:
    """Return what to check where access is denied; "" for other errors."""
    if type(error).__name__ in _NO_CREDENTIALS:
        return "set the environment, the configuration files or storage_options (key, secret)"
    if code in _EXPIRED:
        return "the credentials have expired: get new ones and start again"
    if code in _WRONG_KEYS:
        return "the access key, its secret or the session token is wrong"
    if code == "RequestTimeTooSkewed":
        return "set the clock of this machine"
    if code in _WRONG_REGION:
        region = f"{{'region_name': {_region(error)}}}"
        return f"the bucket is in another region: give client_kwargs={region}"
    if status_of(error) in (401, 403):
        return (
            "check the credentials and their permissions to list the bucket and to put, get and "
            "delete objects there"
        )
    return ""


def _region(error: Exception) -> str:
    """Return the region that the answer names, as a Python literal."""
    response: Any = getattr(error, "response", {})
    headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region = headers.get("x-amz-bucket-region") or response.get("Error", {}).get("Region")
    return repr(region) if region else "..."


class _SlicedBody(Payload):
    """Memory as a body for aiohttp, and as a file for botocore, which may hash it.

    It is sent in slices, so that the transport copies no more than one of them at a time.
    """

    def __init__(self, data: bytes | bytearray) -> None:
        super().__init__(data, content_type="application/octet-stream")
        self._view = memoryview(data)
        self._size = len(data)
        self._at = 0

    def __len__(self) -> int:
        """Return the length in bytes."""
        return len(self._view)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Raise TypeError: the body is binary."""
        raise TypeError("the body is binary")

    async def write(self, writer: Any) -> None:
        """Send all slices, each once the connection accepts it."""
        for begin in range(0, len(self._view), _SLICE):
            await writer.write(self._view[begin : begin + _SLICE])

    async def write_with_length(self, writer: Any, content_length: int | None) -> None:
        """Send all; the length is known already."""
        await self.write(writer)

    def read(self, size: int = -1) -> bytes:
        """Read like a file."""
        end = len(self._view) if size < 0 else self._at + size
        data = bytes(self._view[self._at : end])
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """Seek like a file."""
        self._at = offset + (0, self._at, len(self._view))[whence]
        return self._at

    def tell(self) -> int:
        """Return the position, like a file."""
        return self._at
