"""What is told of where a recording was made, and what is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sightline.store import load, save
from sightline.store.environment import MASK, mask_arguments, mask_secrets
from tests.builders import make_trace

SECRET = "hunter2butLonger"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--token=" + SECRET], ["--token", SECRET], ["--api-key", SECRET], ["--api_key=" + SECRET],
        ["-password", SECRET], ["--hf-token", SECRET], ["--wandb.api_key", SECRET],
        ["+wandb.api_key=" + SECRET], ["WANDB_API_KEY=" + SECRET], ["--secret", SECRET],
        ["--client-secret=" + SECRET], ["--auth", SECRET],
        ["--accessToken=" + SECRET], ["--config", '{"token": "' + SECRET + '", "lr": 1}'], ["--key", SECRET],
        [f"https://me:{SECRET}@example.com/x"], [f"postgres://me:{SECRET}@db/x"], [f"https://{SECRET}@host/x.git"],
        [f"https://example.com/?token={SECRET}&x=1"], ["-H", f"Authorization: Bearer {SECRET}"],
        ["--secrets", SECRET], ["https://hunter2@host"], ["--password", "--" + SECRET],
        ["--header", f"Bearer {SECRET}"], ["--password", "-" + SECRET], ["--pass", "'" + SECRET + "'"],
    ],
)  # fmt: skip
def test_secrets_are_masked(arguments: list[str]) -> None:
    found = mask_arguments(["train.py", *arguments, "--lr", "0.1"])
    assert not any("hunter2" in argument for argument in found)
    assert any(MASK in argument for argument in found)
    assert found[0] == "train.py"
    assert found[-2:] == ["--lr", "0.1"]


@pytest.mark.parametrize(
    "key",
    ["sk-proj-abcdefghijklmnop", "ghp_" + "a1B2" * 9, "hf_" + "aBcD" * 8, "AKIAIOSFODNN7EXAMPLE",
     "xoxb-1234567890-abc", "glpat-abcdefghij1234", "AIza" + "x1Y2" * 9,
     "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc",
     "k3J9xQ2LmZ8vB4nT7wRp1YcD", "qXvZkWpJtRmNbLhGfDsCxVzQwKjHgTrP",
     "aGVsbG8gd29ybGQhIQ9x/4Zk2+Qm7R1c/8Xv0pLw3Tz5", "7f9c2ba4e88f827d616045507605853e",
     "wJalrXUtnFEMI7K7MDENGbPxRfiCYEXAMPLEKEY12"],
)  # fmt: skip
def test_what_looks_like_a_key_is_masked_wherever_it_is(key: str) -> None:
    assert mask_arguments([key]) == [MASK]
    assert key not in mask_secrets(f"run with {key}, please")


@pytest.mark.parametrize(
    "argument",
    ["--lr=0.1", "train.py", "--tokenizer=gpt2", "--max-tokens=512", "s3://bucket/data/2024-01-01", "-x",
     "/home/me/project/configs/experiment_long_name_number_two.yaml", "--model",
     "meta-llama/Llama-3.2-1B-Instruct",
     "--author=me", "https://example.com/page", "layers=[1,2,3]", "--keyboard=qwerty", "--monkey=1",
     "a_very_long_option_name_without_any_numbers=1", "model.encoder.layers.12.attention.weight",
     "/home/someone/projects/transformers/examples/pytorch/language-modeling/run_clm.py",
     "runs/2024-11-05/resnet50-imagenet-lr0.1-bs256/checkpoint-100000", "internationalization_configuration"],
)  # fmt: skip
def test_plain_arguments_stay(argument: str) -> None:
    assert mask_arguments([argument]) == [argument]


def test_the_command_line_in_a_bundle_is_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--token", SECRET])
    save(make_trace().data, tmp_path / "run.sight")
    assert load(tmp_path / "run.sight").environment["command"] == ["train.py", "--token", MASK]
    assert SECRET.encode() not in (tmp_path / "run.sight" / "rank0.db").read_bytes()


def test_a_loaded_trace_keeps_the_environment_it_was_made_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["first.py"])
    save(make_trace().data, tmp_path / "a.sight")
    monkeypatch.setattr(sys, "argv", ["second.py"])
    save(load(tmp_path / "a.sight"), tmp_path / "b.sight")
    assert load(tmp_path / "b.sight").environment["command"] == ["first.py"]
    save(load(tmp_path / "a.sight"), tmp_path / "c.sight", environment=False)
    save(load(tmp_path / "c.sight"), tmp_path / "d.sight")
    assert not load(tmp_path / "d.sight").environment


def test_half_of_no_random_words_are_shown() -> None:
    import base64
    import random
    import string

    chance = random.Random(0)
    alphabets = (string.ascii_letters + string.digits, string.ascii_letters, string.hexdigits.lower()[:16])
    for alphabet, length in zip(alphabets, (24, 32, 40), strict=True):
        words = ["".join(chance.choice(alphabet) for _ in range(length)) for _ in range(300)]
        assert sum(mask_secrets(word) != MASK for word in words) <= 15
    keys = [base64.b64encode(chance.randbytes(30)).decode() for _ in range(300)]
    assert sum(any(part in mask_secrets(key) for part in (key[:12], key[-12:])) for key in keys) <= 15


def test_a_long_argument_takes_no_time() -> None:
    for text in ("a" * 50_000, "a1B" * 20_000, "a://" * 12_000, "key=" * 12_000, "token" * 10_000):
        assert len(mask_secrets(text)) < 20_000  # it took half a minute
