"""A state goes over TCP whole, and to those alone who know the token."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from accel_callbacks import launch_notes
from accel_callbacks.replicas import state_server
from accel_callbacks.replicas.state_server import StateServer, StateTransferError, fetch_state


def written(folder: str) -> None:
    (Path(folder) / "inner").mkdir(parents=True)
    (Path(folder) / "manifest.json").write_text("{}")
    (Path(folder) / "inner" / "weights").write_bytes(bytes(range(256)) * 9000)


@pytest.fixture
def server():
    server = StateServer("127.0.0.1", "secret", timeout=2.0)
    yield server
    server.close()


def files_in(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_a_folder_comes_whole_and_is_removed_with_the_next(server, tmp_path):
    server.publish("1", written)
    fetch_state(server.address, "1", "secret", str(tmp_path / "copy"), 5.0)
    written(str(tmp_path / "same"))
    assert files_in(tmp_path / "copy") == files_in(tmp_path / "same")
    root = Path(server.folder("1", 0.0))
    server.publish("2", written)
    assert not root.exists()
    with pytest.raises(StateTransferError, match="no state 1 is served"):
        fetch_state(server.address, "1", "secret", str(tmp_path / "old"), 5.0)


def test_a_launcher_has_the_folder_and_removes_what_a_kill_has_left(server, tmp_path, monkeypatch):
    monkeypatch.setenv(launch_notes.VARIABLE, str(tmp_path))
    server.publish("1", written)
    assert Path(server.folder("1", 0.0)).parents[1] == tmp_path
    monkeypatch.setenv(launch_notes.VARIABLE, str(tmp_path / "gone"))
    server.publish("2", written)
    assert tmp_path not in Path(server.folder("2", 0.0)).parents


def test_a_state_that_is_being_written_is_waited_for(server, tmp_path):
    threading.Timer(0.3, server.publish, ("late", written)).start()
    fetch_state(server.address, "late", "secret", str(tmp_path / "copy"), 5.0)
    assert len(files_in(tmp_path / "copy")) == 2


def test_who_does_not_know_the_token_gets_nothing(server, tmp_path):
    server.publish("1", written)
    with pytest.raises(StateTransferError, match="ACCEL_REPLICA_TOKEN"):
        fetch_state(server.address, "1", "guess", str(tmp_path / "copy"), 5.0)
    assert not (tmp_path / "copy").exists()


def test_a_server_that_does_not_know_the_token_is_not_believed(server, tmp_path, monkeypatch):
    server.publish("1", written)
    proof, client = state_server._proof, threading.current_thread()

    def forged(token: str, challenge: str, text: str) -> str:
        answers = threading.current_thread() is not client and text.startswith("[[")
        return proof("guess" if answers else token, challenge, text)

    monkeypatch.setattr(state_server, "_proof", forged)
    with pytest.raises(StateTransferError, match="does not know the token"):
        fetch_state(server.address, "1", "secret", str(tmp_path / "copy"), 5.0)


def test_a_state_that_could_not_be_written_is_said_to_be_none(server, tmp_path):
    def full(folder: str) -> None:
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        server.publish("1", full)
    with pytest.raises(StateTransferError, match="could not be written"):
        fetch_state(server.address, "1", "secret", str(tmp_path / "copy"), 5.0)


@pytest.mark.parametrize("change", ["flip", "cut"])
def test_damage_on_the_way_is_noticed(server, tmp_path, change):
    server.publish("1", written)
    with Tampering(server.address, change) as proxy, pytest.raises(StateTransferError):
        fetch_state(proxy.address, "1", "secret", str(tmp_path / "copy"), 2.0)


def test_names_outside_of_the_folder_are_refused(server, tmp_path, monkeypatch):
    server.publish("1", written)
    described = state_server._described
    monkeypatch.setattr(
        state_server, "_described", lambda folder: [("../evil", 2, "x"), *described(folder)]
    )
    with pytest.raises(StateTransferError, match="outside"):
        fetch_state(server.address, "1", "secret", str(tmp_path / "copy"), 5.0)
    assert not (tmp_path / "evil").exists()


class Tampering:
    """A relay that flips a byte of what is sent back, or ends it early, after 100 kB."""

    def __init__(self, address: str, change: str) -> None:
        host, _, port = address.rpartition(":")
        self.target, self.change = (host, int(port)), change
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"

    def __enter__(self) -> Tampering:
        threading.Thread(target=self.relay, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.listener.close()

    def relay(self) -> None:
        client, _ = self.listener.accept()
        with client, socket.create_connection(self.target) as server:
            threading.Thread(target=self.forward, args=(client, server), daemon=True).start()
            sent = 0
            while data := bytearray(server.recv(4096)):
                if sent <= 100_000 < sent + len(data):
                    if self.change == "cut":
                        return
                    data[0] ^= 1
                client.sendall(data)
                sent += len(data)

    def forward(self, client: socket.socket, server: socket.socket) -> None:
        try:
            while data := client.recv(4096):
                server.sendall(data)
        except OSError:
            pass
