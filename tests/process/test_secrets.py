"""Tokens, keys, secrets and passwords in a command: the command gets them, and nothing that dpmon writes has them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from support.run_harness import Dpmon, plain_training_script, wait_for

SECRET = "S3CRET"
SHOW_ARGUMENTS = """\
import json, sys
with open("arguments.json", "w") as file:
    json.dump(sys.argv[1:], file)
"""
GIVEN = (
    *(
        "--api-key=S3CRET1",
        "--token",
        "S3CRET2",
        "--tokenizer",
        "gpt2",
        "wandb.apiKey=S3CRET a=b",
        "--hf-token",
        "gpt2",
    ),
    *("--db.password", "S3CRET ключ =", "--secret", "", "--key", "--epochs", "3", "--client-secret", "S3CRET\udcff"),
    *("bash -c 'HF_TOKEN=S3CRET4 x'", "--max-tokens", "512", "--token"),
)
SHOWN = [
    *("--api-key=***", "--token", "***", "--tokenizer", "gpt2", "wandb.apiKey=***", "--hf-token", "***"),
    *("--db.password", "***", "--secret", "***", "--key", "--epochs", "3", "--client-secret", "***"),
    *("bash -c 'HF_TOKEN=***", "--max-tokens", "512", "--token"),
]
READERS = (
    *("report first", "report first --json", "report first --html -o report.html", "export first"),
    *("export first --follow", "export first --format csv -o rows", "export first --format perfetto -o trace.json"),
    *("ls", "ls --json", "status first --json", "compare first last"),
)


def has_secret(path: Path) -> bool:
    """Return whether a file has the secret. A run's process may replace or delete the file meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return path.is_file() and SECRET.encode() in path.read_bytes()
    return False


def check_files(directory: Path) -> None:
    """Check that no file has the secret."""
    assert [path.name for path in directory.rglob("*") if has_secret(path)] == []


def check_readers(dpmon: Dpmon) -> str:
    """Check that no command shows or exports the secret; return the text of all that they print."""
    printed = ""
    for words in READERS:
        result = dpmon.run(*words.split())
        assert result.status in (0, 3), (words, result.errors)
        printed += result.text + result.errors
    assert SECRET not in printed
    return printed


def test_only_the_command_gets_its_secrets(dpmon: Dpmon, tmp_path: Path) -> None:
    dpmon.waiting("", f"{SHOW_ARGUMENTS}{plain_training_script(20)}")
    told = tmp_path / "told"
    event = f"sh -c 'cat /proc/$PPID/environ >>{told}; env >>{told}; cat >>{told}'"
    metrics = tmp_path / "metrics.prom"
    own = "--name", "first", "--json=lines.jsonl", "--metrics", metrics, "--on-event", event
    run = dpmon.start("--headless", *own, *dpmon.warm(), "script.py", *GIVEN)
    dpmon.begun()
    arguments = dpmon.cwd / "arguments.json"
    assert json.loads(arguments.read_text()) == list(GIVEN)
    arguments.unlink()
    wait_for(lambda: dpmon.run("export", "--kind", "step").text.count("\n") > 10)
    wait_for(metrics.exists)
    check_files(dpmon.last())  # while the history has a journal
    dpmon.go()
    out, err = run.communicate(timeout=100)
    assert run.returncode == 0, err
    assert SECRET.encode() not in out + err
    again = [word.replace(SECRET, "again") for word in GIVEN]
    assert dpmon.run("--headless", *dpmon.warm(), "script.py", *again).status == 0
    (process,) = [record for record in dpmon.records("first") if record["kind"] == "process"]
    assert process["argv"][1:] == SHOWN
    wait_for(lambda: "dpmon.run.ended" in told.read_text(errors="replace"))
    assert "--tokenizer gpt2" in check_readers(dpmon)
    check_files(tmp_path)


def test_variables_in_front_of_a_program(dpmon: Dpmon, tmp_path: Path) -> None:
    check = 'test "$HF_TOKEN" = S3"CRET"'
    result = dpmon.run("--headless", "env", f"HF_TOKEN={SECRET}", "MODE=a", "sh", "-c", check)
    assert result.status == 0, result.errors
    assert dpmon.info()["command"][:3] == ["env", "HF_TOKEN=***", "MODE=a"]
    check_files(tmp_path)


def test_a_wrong_command_line_shows_no_secret(dpmon: Dpmon) -> None:
    for word in (f"--api-key={SECRET}", f"HF_TOKEN={SECRET}"):
        result = dpmon.run("--headless", word, "script.py")
        assert result.status == 2
        assert f"{word.partition('=')[0]}=***" in result.errors
        assert SECRET not in result.errors
