"""Which variables are masked; each of the first group was printed, or masked for nothing, by the rules before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.schedulers.secret_variables import is_secret, mask_args, mask_env


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DATABASE_URL", "postgres://db/train"),
        ("GITHUB_PAT", "x"),
        ("HF_TOKEN", "x"),
        ("HFTOKEN", "x"),
        ("MUSTER_TOKEN", "x"),
        ("AWS_SECRET_ACCESS_KEY", "x"),
        ("PGPASSWORD", "x"),
        ("DB_PWD", "x"),
        ("apiKey", "x"),
        ("SENTRY_DSN", "https://abc@sentry.io/1"),
        ("SSH_PASSPHRASE", "x"),
        ("GCS_CREDENTIALS", "{}"),
        ("BROKER", "amqp://user:hunter2@host:5672/"),
        ("PROXY", "http://me:pw@proxy:3128"),
        ("EXTRA", "-----BEGIN OPENSSH PRIVATE KEY-----\nabc"),
        ("ANYTHING", "ghp_0123456789abcdefghijABCDEFGHIJ012345"),
        ("DATA", "https://store/x?sig=abcdef&sv=1"),
        ("SESSION", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln"),
        ("API_TOKENS", "a,b"),
        ("SSHPASS", "x"),
        ("DBPASS", "x"),
        ("CREDS", "x"),
        ("PRIVKEY", "x"),
        ("NETRC", "machine x"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x-team=a"),
        ("REPO", "https://ghp_0123456789abcdefghijABCDEFGHIJ@github.com/a/b"),
        ("INDEX", "https://0123456789abcdefghij@packages.example/simple"),
        ("NOTIFY", "https://hooks.slack.com/services/T0/B0/abc"),
        ("CHAT", "https://discord.com/api/webhooks/1/abc"),
        ("STORE", "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=abc==;EndpointSuffix=b"),
        ("DOCKER", '{"auths": {"ghcr.io": {\n"auth": "YTpi"}}}'),
        ("DOCKER", '{"auths": {"ghcr.io": {"username": "u", "password": "p"}}}'),
        ("FEISHU", "https://open.feishu.cn/open-apis/bot/v2/hook/abc"),
        ("WECHAT", "https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=abc"),
        ("TELEGRAM", "https://api.telegram.org/bot12345:abc/sendMessage"),
        ("MAPS", "https://maps.example/api?key=abc"),
        ("OPTIONS", "--token hf_0123456789abcdefghij"),
        ("SETTINGS", "{'lr': 0.1, 'api_key': 'abc'}"),
        ("NGC", "nvapi-0123456789abcdefghij"),
        ("HEADER", "Authorization: Bearer abcdefgh12345"),
    ],
)
def test_is_secret(name, value):
    assert is_secret(name, value)
    assert mask_env({name: value}) == {name: "***"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("MUSTER_REQUIRE_TOKEN", "1"),
        ("MAX_TOKENS", "4096"),
        ("MONKEY", "m"),
        ("KEYBOARD", "de"),
        ("PWD", "/work"),
        ("SSH_KEY_PATH", "/keys/id"),
        ("AWS_SHARED_CREDENTIALS_FILE", "/aws/credentials"),
        ("PATH", "/bin:/usr/bin"),
        ("DATA_URL", "https://store/x?version=3"),
        ("ENDPOINT", "host:29500"),
        ("NCCL_SOCKET_IFNAME", "eth0"),
        ("HF_TOKEN", ""),
        ("BYPASS", "1"),
        ("MODEL", "hf-internal-testing/tiny-random-gpt2"),
        ("WEIGHTS", "my_hf_checkpoint_of_yesterday_evening"),
        ("SETTINGS", '{"tokenizer": "bert", "keys": ["a"], "token": ""}'),
        ("PAGE", "https://example.org/hooking/a?monkey=1"),
        ("COMPASS", "north"),
        ("REMOTE", "ssh://git@github.com/a/b"),
        ("NAME", "ask_me_about-this-long-name-here"),
    ],
)
def test_is_not_secret(name, value):
    assert not is_secret(name, value)


@given(st.text(max_size=30), st.text(max_size=60))
def test_any_name_and_value_is_judged(name, value):
    assert mask_env({name: value})[name] in (value, "***")


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["--api_key=abc", "--lr", "0.1"], ["--api_key=***", "--lr", "0.1"]),
        (["--api-key", "abc", "x"], ["--api-key", "***", "x"]),
        (["--password", "--verbose"], ["--password", "--verbose"]),
        (["db.password=abc", "epochs=3"], ["db.password=***", "epochs=3"]),
        (["main.py", "nvapi-0123456789abcdefghij"], ["main.py", "***"]),
        (["--tokenizer", "bert", "--max-tokens=4096"], ["--tokenizer", "bert", "--max-tokens=4096"]),
        (["--max-tokens", "--key-path", "/k"], ["--max-tokens", "--key-path", "/k"]),
    ],
)
def test_arguments(args, shown):
    assert mask_args(args) == shown
