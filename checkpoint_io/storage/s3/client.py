"""One bucket through the client that s3fs makes: configured, bounded in time, fork-safe."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from checkpoint_io.storage.retry import Attempts, RetryPolicy
from checkpoint_io.stores.s3_body import body_of
from checkpoint_io.stores.s3_errors import Place, explain, is_transient
from checkpoint_io.threads import ThreadForEach

T = TypeVar("T")

STEP = 16 << 20  # bytes for which `read_timeout` seconds are allowed, and the usual part
_CONNECTIONS = 32


def configured(
    options: Mapping[str, Any], policy: RetryPolicy
) -> tuple[dict[str, Any], RetryPolicy]:
    """Return s3fs options and the policy, each completed by what the other one says.

    Timeouts and `retries` of the caller's `config_kwargs` go into the policy, and the client's own
    repetitions are switched off, so that ours are the only ones.
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
            # the body is vouched for by a checksum in a signed header; hashing it again is dear
            config["s3"] = {"payload_signing_enabled": False, **(config.get("s3") or {})}
        config.update(_quiet_checksums())
    result["config_kwargs"] = config
    return result, policy


def sends_checksums(options: Mapping[str, Any]) -> bool:
    """Say whether uploads carry checksums: unless botocore's own setting says "when_required"."""
    config = options.get("config_kwargs") or {}
    name = "request_checksum_calculation"
    asked = config.get(name) or os.environ.get(f"AWS_{name.upper()}") or ""
    return str(asked).lower() != "when_required"


def _may_leave_unsigned(options: Mapping[str, Any]) -> bool:
    """Say whether the store takes unsigned bodies; AWS does not without encryption."""
    client = options.get("client_kwargs") or {}
    endpoint = str(options.get("endpoint_url") or client.get("endpoint_url") or "")
    plain = endpoint.startswith("http://") or not options.get("use_ssl", True)
    return not (plain and (not endpoint or "amazonaws.com" in endpoint))


def _quiet_checksums() -> dict[str, str]:
    """Keep botocore from adding checksums beside ours, where it is new enough to know how."""
    from botocore.config import Config

    names = ("request_checksum_calculation", "response_checksum_validation")
    return {name: "when_required" for name in names if name in Config.OPTION_DEFAULTS}


class S3Client:
    """Requests to one bucket, from any thread, in this process or in a forked child."""

    def __init__(
        self, bucket: str, endpoint: str, policy: RetryPolicy, make: Callable[[], Any]
    ) -> None:
        self.bucket = bucket
        self.policy = policy
        self.place = Place(bucket, endpoint)
        self._make = make
        self._pid = -1
        self._filesystem: Any = None

    @property
    def filesystem(self) -> Any:
        """Return the s3fs filesystem of this process; a forked child needs one of its own."""
        if self._pid != os.getpid():
            self._filesystem = self._make()
            self._pid = os.getpid()
            _outlive_executors(self.loop)
        return self._filesystem

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop on which the requests run."""
        loop: asyncio.AbstractEventLoop = self._filesystem.loop
        return loop

    def start(self, work: Coroutine[Any, Any, T]) -> Any:
        """Begin work on the loop; returns its concurrent future."""
        _ = self.filesystem
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work on the loop and wait for it; an interrupt here ends it there."""
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
        return await filesystem.get_s3(self.bucket)

    def body(self, data: bytes | bytearray) -> Any:
        """Return the form in which bytes are sent best."""
        return body_of(data, self.filesystem.config_kwargs)

    async def once(self, operation: str, step: float = 1.0, **arguments: Any) -> Any:
        """Send one request once; `step` is how many times the read timeout it may take."""
        filesystem = self.filesystem
        method = getattr(await self.connected(), operation)
        known = filesystem._get_s3_method_kwargs(
            method, filesystem.req_kw, Bucket=self.bucket, **arguments
        )
        bound = self.policy.connect_timeout + step * self.policy.read_timeout
        return await asyncio.wait_for(method(**known), bound)

    async def repeat(
        self,
        doing: str,
        key: str | None,
        action: Callable[[], Awaitable[T]],
        policy: RetryPolicy | None = None,
    ) -> T:
        """Run an action until it succeeds, within the policy; transient errors are waited out.

        Permanent errors are raised as they are, so that the caller can tell what they mean.
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
        """Send a request that may be repeated; errors say what to do."""
        if key is not None:
            arguments["Key"] = key
        try:
            return await self.repeat(doing, key, lambda: self.once(operation, **arguments))
        except Exception as error:
            explained = self.explain(error, doing, key)
            if explained is error:
                raise
            raise explained from error

    def explain(
        self, error: Exception, doing: str, key: str | None, tried: str = "tried once"
    ) -> Exception:
        """Return what to raise for an error that no repetition will help."""
        return explain(error, doing, self.place, key, tried)

    async def read(self, key: str) -> tuple[bytes, str]:
        """Read a small object whole; returns it and its entity tag."""

        async def look() -> tuple[bytes, str]:
            answer = await self.once("get_object", Key=key)
            body = answer["Body"]
            step = 1 + int(answer.get("ContentLength") or 0) / STEP
            async with body:
                data = await asyncio.wait_for(body.read(), step * self.policy.read_timeout)
            return bytes(data), str(answer.get("ETag", ""))

        return await self.repeat("reading", key, look)


def _outlive_executors(loop: asyncio.AbstractEventLoop) -> None:
    """Let the loop look up names while the interpreter waits for a thread that still saves.

    asyncio does that in an executor of the standard library, which takes no work by then.
    """
    if getattr(loop, "_default_executor", None) is None:
        loop.call_soon_threadsafe(loop.set_default_executor, ThreadForEach())
