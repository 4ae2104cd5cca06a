"""The training state of a replica for one that comes: files over TCP, keyed and checksummed."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import shutil
import socket
import socketserver
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from accel_callbacks.launch_notes import folder_of_launch

__all__ = ["StateServer", "StateTransferError", "fetch_state"]

_PIECE = 2**20  # bytes that are read or written at once
_LONGEST = 2**24  # bytes of a message that lists files
_POLL = 0.05  # seconds between two questions for a state that is still being written


class StateTransferError(RuntimeError):
    """A state did not come whole, or from a replica that does not know the token."""


class StateServer:
    """Serves the folder of one training state at a time to replicas that know the token.

    Both sides prove that they know it by a keyed hash of the other's random number, so it is never
    sent, and the list of files with their checksums is proved likewise.

    Args:
        address: of this machine, to listen at.
        token: shared by all replicas.
        timeout: seconds that a client may be silent.
    """

    def __init__(self, address: str, token: str, timeout: float) -> None:
        self._folders: dict[str, str | None] = {}  # by key; None if it could not be written
        self._root: str | None = None
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server_class = type("_Server", (_Server,), {"address_family": family})
        self._server: Any = server_class((address, 0), _handler(self, token, timeout))
        thread = threading.Thread(
            target=self._server.serve_forever, name="accel-replica-state", daemon=True
        )
        thread.start()
        self.address = f"{address}:{self._server.server_address[1]}"

    def publish(self, key: str, write: Callable[[str], object]) -> None:
        """Serve a state, and those before no longer.

        Args:
            key: by which replicas ask for it.
            write: writes it into a folder that does not exist yet. If it raises, whoever asks for
                the state is told that there is none.
        """
        self.forget()
        try:
            self._root = tempfile.mkdtemp(prefix="accel-replica-", dir=folder_of_launch())
            folder = os.path.join(self._root, "state")
            write(folder)
        except BaseException:
            self._folders = {key: None}
            raise
        self._folders = {key: folder}

    def forget(self) -> None:
        """Remove the state that is served."""
        self._folders = {}
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root = None

    def folder(self, key: str, deadline: float) -> str:
        """Return the folder of a state, waiting until it is written.

        Raises:
            StateTransferError: it could not be written, or is not until the deadline.
        """
        while key not in self._folders:
            if time.monotonic() > deadline:
                raise StateTransferError(f"no state {key} is served here")
            time.sleep(_POLL)
        folder = self._folders[key]
        if folder is None:
            raise StateTransferError(f"the state {key} could not be written")
        return folder

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self.forget()


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the replica that asked reports what failed."""


def _handler(server: StateServer, token: str, timeout: float) -> type:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            """Answer one replica."""
            self.request.settimeout(timeout)
            challenge = secrets.token_hex(32)
            _send(self.request, {"challenge": challenge})
            asked = _receive(self.request)
            key, mine = str(asked.get("key")), str(asked.get("challenge"))
            if not hmac.compare_digest(str(asked.get("proof")), _proof(token, challenge, key)):
                _send(self.request, {"error": "the token is another one"})
                return
            try:
                folder = server.folder(key, time.monotonic() + timeout)
                files = _described(folder)
            except (StateTransferError, OSError) as error:
                _send(self.request, {"error": str(error)})
                return
            text = json.dumps(files)
            _send(self.request, {"files": text, "proof": _proof(token, mine, text)})
            for name, _, _ in files:
                with open(os.path.join(folder, *PurePosixPath(name).parts), "rb") as file:
                    self.request.sendfile(file)

    return Handler


def fetch_state(address: str, key: str, token: str, folder: str, timeout: float) -> None:
    """Copy the state that another replica serves into a new folder.

    Args:
        address: host and port of its :class:`StateServer`.
        key: of the state.
        token: shared by all replicas.
        folder: to be made.
        timeout: seconds that the other replica may be silent.

    Raises:
        StateTransferError: it did not come whole. Remove the folder.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout) as connection:
            _fetch(connection, key, token, folder)
    except (OSError, ValueError) as error:
        raise StateTransferError(f"the state of {address} did not come: {error}") from error


def _fetch(connection: socket.socket, key: str, token: str, folder: str) -> None:
    challenge, hello = secrets.token_hex(32), _receive(connection)
    proof = _proof(token, str(hello.get("challenge")), key)
    _send(connection, {"key": key, "proof": proof, "challenge": challenge})
    answer = _receive(connection)
    if "error" in answer:
        raise StateTransferError(
            f"{answer['error']}: give all replicas the same token (ACCEL_REPLICA_TOKEN), and see "
            "what the replica that trains has printed."
        )
    text = str(answer.get("files"))
    if not hmac.compare_digest(str(answer.get("proof")), _proof(token, challenge, text)):
        raise StateTransferError("the replica that answered does not know the token")
    for name, nbytes, digest in json.loads(text):
        path = os.path.join(folder, *PurePosixPath(name).parts)
        if not _is_inside(name):
            raise StateTransferError(f"{name!r} is outside of the folder")
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        if _save_bytes(connection, path, nbytes) != digest:
            raise StateTransferError(f"{name} came with another checksum than it was sent with")


def _save_bytes(connection: socket.socket, path: str, nbytes: int) -> str:
    """Write what comes into a file; return its checksum."""
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        while nbytes:
            piece = connection.recv(min(nbytes, _PIECE))
            if not piece:
                raise StateTransferError("the replica that sent the state is gone")
            digest.update(piece)
            file.write(piece)
            nbytes -= len(piece)
    return digest.hexdigest()


def _described(folder: str) -> list[tuple[str, int, str]]:
    """Return the files of a folder with their sizes and checksums."""
    described = []
    for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
        name = path.relative_to(folder).as_posix()
        described.append((name, path.stat().st_size, digest.hexdigest()))
    return described


def _is_inside(name: str) -> bool:
    """Return whether a name is below its folder, on Windows too."""
    path = PurePosixPath(name)
    odd = path.is_absolute() or ".." in path.parts or not path.parts
    return not (odd or ":" in name or "\\" in name)


def _proof(token: str, challenge: str, text: str) -> str:
    return hmac.new(token.encode(), f"{challenge}\0{text}".encode(), hashlib.sha256).hexdigest()


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    connection.sendall(struct.pack("!I", len(data)) + data)


def _receive(connection: socket.socket) -> dict[str, Any]:
    (nbytes,) = struct.unpack("!I", _exactly(connection, 4))
    if nbytes > _LONGEST:
        raise StateTransferError(f"a message of {nbytes} bytes is none of a replica")
    message = json.loads(_exactly(connection, nbytes))
    if not isinstance(message, dict):
        raise StateTransferError("what came is no message of a replica")
    return message


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        piece = connection.recv(nbytes - len(data))
        if not piece:
            raise StateTransferError("the other replica has closed the connection")
        data += piece
    return bytes(data)
