"""The scripts for events in docs/stuck.md, run against stand-ins for the services."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dpmon.notify.notifier import to_cloudevent
from dpmon.notify.run_notifications import Notification
from dpmon.sanitize import to_safe_json
from support.format_readers import DOCS, blocks
from support.history_builders import make_run_info

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("jq") and shutil.which("curl")), reason="the scripts use jq and curl"),
]
SCRIPTS = [text for _, text in blocks(DOCS / "stuck.md") if text.startswith("#!/bin/sh")]
STALL = "rank 1 in save (t.py:3); rank 0 waits in \"backward\" '$(id)'"
ADDRESS = re.compile(r"https://\S+")
STAND_IN = '#!/bin/sh\nprintf "%s\\n" "$(basename "$0")" "$@" >>called\n[ -t 0 ] || cat >>called\n'


def script(word: str) -> str:
    """The script whose comment begins with this word."""
    (found,) = [text for text in SCRIPTS if text.splitlines()[1].startswith(f"# {word}")]
    return found


def event(kind: str) -> bytes:
    """An event as the command gets it."""
    run = make_run_info(id="20261125-213000-train-3f2a", name="train", host="box7")
    happened = Notification(kind, "1", {"text": STALL}, 1.0)
    return to_safe_json(to_cloudevent(happened, happened.id_in(run.id), run)).encode() + b"\n"


class Service:
    """A service on this machine that keeps what it gets, and a place to run scripts."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.requests: list[tuple[str, str]] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.address = f"http://127.0.0.1:{self.server.server_port}/hook"
        (place / "mail").write_text(STAND_IN)
        (place / "mail").chmod(0o755)

    def handler(self) -> type[BaseHTTPRequestHandler]:
        """A handler of requests that notes path and body."""
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                requests.append((self.path, body.decode()))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def run(self, text: str, *kinds: str) -> None:
        """Run a script for an event of each of these types."""
        path = self.place / "tell"
        path.write_text(ADDRESS.sub(self.address, text))
        env = {**os.environ, "PATH": f"{self.place}:{os.environ['PATH']}", "no_proxy": "*"}
        for kind in kinds:
            subprocess.run(
                ["/bin/sh", str(path)],
                input=event(kind),
                cwd=self.place,
                env=env,
                stdout=subprocess.DEVNULL,
                timeout=60,
                check=False,
            )

    @property
    def called(self) -> str:
        """The arguments and the input of the programs that the script has called."""
        path = self.place / "called"
        return path.read_text() if path.exists() else ""


@pytest.mark.parametrize(("status", "logged"), [(0, False), (3, False), (4, False), (5, True), (6, True), (127, False)])
def test_cron_logs_only_a_stall_or_a_failure(tmp_path: Path, status: int, logged: bool) -> None:
    (text,) = [text for _, text in blocks(DOCS / "stuck.md") if text.startswith("# cron")]
    line = text.splitlines()[1].removeprefix("*/10 * * * * ")
    assert "%" not in line, "cron would end the line there"
    for name, code in (
        ("dpmon", f"echo 'train  stalled: $(id)' \"$*\"\nexit {status}"),
        ("logger", 'echo "$1" >>called'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["/bin/sh", "-c", line], cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, timeout=60, check=False)
    called = tmp_path / "called"
    assert (called.read_text() if called.exists() else "") == ("train  stalled: $(id) status train\n" if logged else "")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


KINDS = ("dpmon.run.alive", "dpmon.run.stalled", "dpmon.run.ended")


def test_a_webhook_gets_the_sentence(service: Service) -> None:
    service.run(script("Slack"), *KINDS)
    assert [path for path, _ in service.requests] == ["/hook", "/hook"]
    assert json.loads(service.requests[0][1]) == {"text": f"train-3f2a: {STALL}"}


def test_mail_is_sent_if_something_is_wrong(service: Service) -> None:
    service.run(script("mail"), *KINDS)
    first, _, rest = service.called.partition("{")
    assert first.splitlines()[0] == "mail"
    assert first.splitlines()[-1] == "me@example.org"
    assert json.loads("{" + rest)["data"]["text"] == STALL


def test_a_dead_man_service_gets_signs_of_life_and_of_failure(service: Service) -> None:
    service.run(script("a dead-man"), *KINDS, "dpmon.run.failed")
    assert [path for path, _ in service.requests] == ["/hook", "/hook/fail", "/hook/fail"]
