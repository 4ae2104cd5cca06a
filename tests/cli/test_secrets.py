"""Secrets in config files and variables are not printed: only that they are set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accel_callbacks.callbacks.dispatch.instances import option_text
from accel_callbacks.cli.main import main
from accel_callbacks.loop.run_identity import RunIdentity
from loggers.redaction import HIDDEN, redacted

FILE = """
num_processes: 2
tpu_env: ["WANDB_API_KEY=hush one", "DEBUG=shown"]
commands: ["export HF_TOKEN=hush; ls -l", "login --password hush -v", "curl https://me:hush@host/"]
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "home"))
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(words) == code
    out, err = capsys.readouterr()
    return out + err


def test_env_shows_no_secret_within_lists(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "accel.yaml").write_text(FILE)
    text = printed(capsys, "env")
    assert "hush" not in text
    assert f"WANDB_API_KEY={HIDDEN}" in text
    assert "DEBUG=shown" in text
    assert f"export HF_TOKEN={HIDDEN} ls -l" in text
    assert f"https://{HIDDEN}@host/" in text
    assert "- num_processes: 2\n" in text


def test_env_shows_no_value_of_a_secret_name(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (
        "wandb_key",
        "AUTH",
        "my_token",
        "the_secret",
        "db_password",
        "aws_credentials",
        "Key2",
    )
    lines = [f"{name}: hush" for name in names]
    lines += ["inner: {login_key: 123456789}", "many_keys: 3", "auth: {user: hush}", "x_token:"]
    (place / "accel.yaml").write_text("\n".join(lines))
    monkeypatch.setenv("ACCEL_WANDB_KEY", "hush")
    monkeypatch.setenv("ACCEL_EXTRA", "auth=hush")
    text = printed(capsys, "env")
    assert "hush" not in text
    assert "123456789" not in text
    for name in (*names, "ACCEL_WANDB_KEY", "login_key", "auth"):
        assert f"- {name}: {HIDDEN}\n" in text
    assert "- many_keys: 3\n" in text
    assert "- x_token: None\n" in text


def test_env_of_a_deeply_nested_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "deep.json").write_text('{"a": ' + "[" * 400 + '"TOKEN=hush"' + "]" * 400 + "}")
    text = printed(capsys, "env", "--config_file", "deep.json")
    assert "hush" not in text
    assert "..." in text


@pytest.mark.parametrize("words", [(), ("--json",)], ids=["table", "json"])
def test_config_show_shows_no_secret(
    words: tuple[str, ...], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "accel.yaml").write_text(FILE)
    text = printed(capsys, "config", "show", *words)
    assert "hush" not in text
    assert HIDDEN in text
    if words:
        settings = json.loads(text)["settings"]
        assert settings["tpu_env"]["value"] == [f"WANDB_API_KEY={HIDDEN}", "DEBUG=shown"]


@pytest.mark.parametrize(
    "line",
    [
        'tpu_env: ["WANDB_API_KEY=hush\\u001b"]',
        "num_processes: SOME_TOKEN=hush",
        "fsdp_config: password=hush",
        "rdzv_endpoint: me_token=hush",
        "WANDB_API_KEY=hush",
    ],
)
def test_errors_of_a_config_file_show_no_secret(
    line: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "accel.yaml").write_text(f"{line}\n")
    (place / "train.py").touch()
    text = printed(capsys, "launch", "--num_machines", "1", "train.py", code=2)
    assert "hush" not in text
    assert HIDDEN in text


def test_errors_of_storage_options_show_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("token:hush", "=hush"):
        text = printed(
            capsys, "ckpt", "ls", "memory://x", "--storage_option", "a=1",
            "--storage_option", option, code=2,
        )  # fmt: skip
        assert "hush" not in text
        assert "number 2" in text


def test_differences_of_a_run_show_no_secret() -> None:
    old = {"lr": 0.1, "wandb": {"api_key": "hush1", "max_tokens": 3}, "env": ["TOKEN=hush"]}
    new = {"lr": 0.2, "wandb": {"api_key": "hush2", "max_tokens": 4}, "env": ["A=1"]}
    lines = RunIdentity.of("a", new).differences(RunIdentity.of("a", old).state_dict())
    assert lines == [
        "config lr: 0.1 -> 0.2",
        f"config wandb.api_key: {HIDDEN} -> {HIDDEN}",
        "config wandb.max_tokens: 3 -> 4",
        f"config env: ['TOKEN={HIDDEN}'] -> ['A=1']",
    ]


def test_options_of_callbacks_show_no_secret() -> None:
    assert option_text({"api_key": "hush"}, [{"api_key": "other"}]) == f"api_key={HIDDEN}"


def test_words_of_a_command_and_long_texts() -> None:
    words = ["run", "--token", "hush", "--json", '{"auth": "hush", "b": 1}']
    assert redacted(words) == ["run", "--token", HIDDEN, "--json", f'{{"auth": {HIDDEN}, "b": 1}}']
    assert redacted({"tokenizer": "gpt2", "use_auth": True}) == {
        "tokenizer": "gpt2",
        "use_auth": True,
    }
    long = [part * 60_000 for part in ("?a=", "hooks.", "://a:", "bearer ", "&x=", "a", "a ", " ")]
    for text in (*long, "--a" + " " * 200_000, '"' * 99_999):
        assert redacted(text) == text  # in linear time


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://s/d.tar?sv=1&sig=hush%3D&se=2", f"https://s/d.tar?sv=1&sig={HIDDEN}&se=2"),
        ("s3://b/k?X-Amz-Signature=hush&a=1", f"s3://b/k?X-Amz-Signature={HIDDEN}&a=1"),
        ("h?X-Amz-Security-Token=hush", f"h?X-Amz-Security-Token={HIDDEN}"),
        ("https://g/o?X-Goog-Signature=hush#top", f"https://g/o?X-Goog-Signature={HIDDEN}#top"),
        ("h/?AWSAccessKeyId=hush&Signature=hush", f"h/?AWSAccessKeyId={HIDDEN}&Signature={HIDDEN}"),
        ("h/?access_token=hush&token=hush&api_key=hush&n=3", None),
        ("https://me:hush@host/p?lr=1", f"https://{HIDDEN}@host/p?lr=1"),
        ("https://hush0123456789abcdef@host/p", f"https://{HIDDEN}@host/p"),
        ("Authorization: Bearer hush", f"Authorization: {HIDDEN}"),
        ("curl -H 'Authorization: token hush' h", f"curl -H 'Authorization: {HIDDEN}' h"),
        ('{"Authorization": "Bearer hush", "a": 1}', f'{{"Authorization": {HIDDEN}, "a": 1}}'),
        ("with Bearer hush0.hush1 it said", f"with Bearer {HIDDEN} it said"),
        ("https://hooks.slack.com/services/T0/B0/hush ok", f"https://hooks.slack.com/{HIDDEN} ok"),
        (
            "https://discord.com/api/webhooks/1/hush",
            f"https://discord.com/api/webhooks/{HIDDEN}",
        ),
        ("--webhook https://any/hush", f"--webhook {HIDDEN}"),
        ("sig=hush", f"sig={HIDDEN}"),
    ],
)
def test_addresses_and_headers_show_no_secret(text: str, shown: str | None) -> None:
    assert "hush" not in redacted(text)
    assert shown is None or redacted(text) == shown
    assert "hush" not in str(redacted({"url": [text]}))
    assert redacted(redacted(text)) == redacted(text)


def test_what_is_no_secret_is_shown() -> None:
    for text in (
        "--max_tokens 5 sig=0.5 code=3 lr=1e-4",
        "https://host/path?part=3&lr=0.1#top",
        "abfss://a-container-with-a-long-name@account.net/runs",
        "the bearer of news",
        "s3://bucket/runs/step-3",
    ):
        assert redacted(text) == text
    vocabulary = {"pad_token": "<pad>", "eos_token": 2, "mask_token": "[M]", "max_tokens": 3}
    assert redacted(vocabulary) == vocabulary
