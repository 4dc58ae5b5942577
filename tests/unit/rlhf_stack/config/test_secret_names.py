"""Which variables are secrets."""

import pytest
from rlhf_stack.config.secret_names import is_secret, without_passwords


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY",
        "HF_TOKEN",
        "MYAPIKEY",
        "DB_PASS",
        "DBPASS",
        "PROXY_AUTH",
        "GIT_PASSPHRASE",
        "AWS_SECRET_ACCESS",
    ],
)
def test_a_name_shows_a_secret(name: str) -> None:
    assert is_secret(name)
    assert is_secret(name.lower())


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "PWD", "RAY_AUTH_MODE", "RLHF_STACK_VERIFY_SYNC", "KEYBOARD"])
def test_other_names_show_none(name: str) -> None:
    assert not is_secret(name)


def test_a_url_with_a_password_is_a_secret() -> None:
    url = "http://user:pass@proxy:3128"
    assert is_secret("HTTPS_PROXY", url)
    assert not is_secret("HTTPS_PROXY", "http://proxy:3128")
    assert without_passwords({"HTTPS_PROXY": url}) == {"HTTPS_PROXY": "http://***@proxy:3128"}
