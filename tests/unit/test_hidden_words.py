"""Which words of a command are hidden: values of options and variables whose name ends in token, key and the like."""

from __future__ import annotations

import pytest

from dpmon.record.shared_names import hide_secrets

ONE_WORD = (
    *("--api-key=", "--hf_token=", "-token=", "--db.password=", "--authToken=", "--HFToken=", "--Secret=", "--KEY="),
    *("--apikey=", "PGPASSWORD=", "--HFTOKEN=", "--monkey="),
    *("HF_TOKEN=", "token=", "wandb.api_key=", "+logger.token=", "++logger/wandb.apiKey=", "--env=HF_TOKEN="),
    *("--url=https://host/?lr=1&api_key=", "bash -c 'HF_TOKEN=", "python t.py --lr 1 --api-key ", "t.py\n -token\n"),
)
OPTIONS = (
    *("--token", "-token", "--api-key", "--wandb_api_key", "--hf-token", "--db.password", "--client-secret"),
    *("--apiKey", "--HF_TOKEN", "--s3key", "--über.key"),
)
VALUES = ("X", "two words", "", "a=b", "foo-key=bar", " --x", "ключ", "\udcff", "-5", "token", "line\nline", "***")
HARMLESS = (
    *("--tokenizer", "gpt2", "--max-tokens", "512", "--num-keys", "8", "--key-frames", "3", "--keyboard", "us"),
    *("--tokens=5", "tokenizer.name=gpt2", "key", "token", "secret.py", "a-key", "b"),
    *("--lr=key", "c", "--token", "--epochs", "3", "-key", "-v", "--key", "--", "", "--token"),
)


@pytest.mark.parametrize("value", VALUES)
def test_values_are_hidden(value: str) -> None:
    for name in ONE_WORD:
        assert hide_secrets(["train.py", f"{name}X{value}", "last"]) == ("train.py", f"{name}***", "last")
    for name in OPTIONS:
        words = ["train.py", name, value, "--tokenizer", "X", "last"]
        assert hide_secrets(words) == ("train.py", name, "***", "--tokenizer", "X", "last")
        assert hide_secrets([name, value]) == (name, "***")
    assert hide_secrets(["--token", value, "--key", value]) == ("--token", "***", "--key", "***")
    assert hide_secrets(["--token", "--key", value]) == ("--token", "--key", "***")


def test_other_words_stay() -> None:
    assert hide_secrets(HARMLESS) == HARMLESS
    assert hide_secrets(["--token="]) == ("--token=***",)
    assert hide_secrets(["t.py --key -5"]) == ("t.py --key ***",)
    assert hide_secrets(["--prompt", "a --token  --epochs 3"]) == ("--prompt", "a --token  --epochs 3")
