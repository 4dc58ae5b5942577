"""Which variables are secrets."""

import pytest
from rlhf_stack.config.secret_names import is_secret, without_passwords


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY",
        "HF_TOKEN",
        "MYAPIKEY",
        *("DB_PASS", "DBPASS", "MYSQLPASS", "SMTPPASS", "SSHPASS", "MYSQL_PWD", "DBPWD"),
        "DBPASSWORD",
        "GITHUBTOKEN",
        "AUTHORIZATION",
        "API_BEARER",
        "GITHUB_PAT",
        "MY_CREDS",
        "registry.auth-token",
        "PROXY_AUTH",
        "GIT_PASSPHRASE",
        "AWS_SECRET_ACCESS",
    ],
)
def test_a_name_shows_a_secret(name: str) -> None:
    assert is_secret(name)
    assert is_secret(name.lower())


@pytest.mark.parametrize(
    "name",
    [
        *("NCCL_DEBUG", "PWD", "RAY_AUTH_MODE", "RLHF_STACK_VERIFY_SYNC", "KEYBOARD"),
        *("MONKEY", "COMPASS", "HF_BYPASS", "PATH", "AUTHOR"),
        *("PROXYBYPASS", "ENCOMPASS", "OVERPASS_URL", "LOWPASS", "OLDPWD", "PASSES"),
    ],
)
def test_other_names_show_none(name: str) -> None:
    assert not is_secret(name)


def test_a_url_with_a_password_is_a_secret() -> None:
    url = "http://user:pass@proxy:3128"
    assert is_secret("HTTPS_PROXY", url)
    assert not is_secret("HTTPS_PROXY", "http://proxy:3128")
    assert without_passwords({"HTTPS_PROXY": url}) == {"HTTPS_PROXY": "http://***@proxy:3128"}


@pytest.mark.parametrize(
    ("value", "without"),
    [
        ("https://ghp_abc@github.com/x", "https://***@github.com/x"),
        ("http://user:p@ss@proxy:3128", "http://***@proxy:3128"),
        ("user:pass@proxy:3128", "***@proxy:3128"),
        ("http://a:b@c,http://d:e@f", "http://***@c,http://***@f"),
        (
            "https://s3/x?X-Amz-Credential=AKIA&X-Amz-Date=1&X-Amz-Signature=ab",
            "https://s3/x?X-Amz-Credential=***&X-Amz-Date=1&X-Amz-Signature=***",
        ),
        ("https://blob/x?sv=1&sig=ab%3D", "https://blob/x?sv=1&sig=***"),
        ("https://api/x?access_token=ab", "https://api/x?access_token=***"),
    ],
)
def test_a_value_shows_a_secret_which_is_replaced(value: str, without: str) -> None:
    assert is_secret("PLACE", value)
    assert without_passwords({"PLACE": value}) == {"PLACE": without}


@pytest.mark.parametrize(
    "value",
    [
        *("ssh://git@github.com/x", "git@github.com:x/y", "a@example.org", "python:3.12@sha256:0123"),
        *("hf://datasets/x@main", "https://host/x?page=2&monkey=1"),
    ],
)
def test_other_values_show_none(value: str) -> None:
    assert not is_secret("PLACE", value)
    assert without_passwords({"PLACE": value}) == {"PLACE": value}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", ["://", "a:", "&key", "?a-", "a@"])
def test_the_time_for_a_long_value_does_not_grow_with_its_square(text: str) -> None:
    is_secret("PLACE", "x" + text * 500_000)
