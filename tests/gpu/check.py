"""The hardware check: one command on a GPU box, no network, one table.

    python tests/gpu/check.py [--rehearse] [--quick] [-k EXPRESSION]

Runs the tests marked `gpu` and the tracer's benchmark, and prints a table: each measured figure beside
its reference, with the GPU's name, the driver and the versions. `--rehearse` runs without a GPU, on the CPU, and skips
tests that need a GPU; `--quick` leaves out the benchmark; `-k` selects tests. If OUT names a directory, the output and
the table (as JSON lines) are also written there. Exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HEAD = ("what", "dpmon", "reference", "apart", "may be", "")


def machine() -> list[str]:
    """Return lines that describe this machine."""
    import torch

    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    driver = "–"
    program = shutil.which("nvidia-smi")
    if program is not None:
        asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = (subprocess.run(asked, capture_output=True, text=True).stdout.splitlines() or ["–"])[0]
    today, names = datetime.date.today().isoformat(), ", ".join(gpus) or "none (a rehearsal on the CPU)"
    return [
        f"{today}, GPUs: {names}; driver {driver}",
        f"torch {torch.__version__} (CUDA {torch.version.cuda or '–'}), Python {platform.python_version()},"
        f" {os.cpu_count()} cores",
    ]


def table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the rows as text in columns: name, figure of dpmon, reference, difference, limit, verdict."""
    lines = [HEAD]
    for row in rows:
        ours, theirs, unit, limit = row["dpmon"], row["reference"], row["unit"], row["limit"]
        share = row["share"] and theirs
        apart = f"{100 * (ours - theirs) / theirs:+.1f}%" if share else f"{ours - theirs:+.4g} {unit}"
        may = "" if limit is None else f"{100 * limit:g}%" if row["share"] else f"{limit:g} {unit}"
        verdict = "ok" if row["good"] else "FAILED"
        lines.append((row["what"], f"{ours:.6g} {unit}", f"{theirs:.6g} {unit}", apart, may, verdict))
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    return ["  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows that the tests have written."""
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except FileNotFoundError:
        return []


_printed: list[str] = []


def say(text: str) -> None:
    """Print text, and keep it for OUT."""
    print(text, flush=True)
    _printed.append(text)


def passed_on(command: list[str], env: Mapping[str, str]) -> int:
    """Run a command, pass on its output, and return its status."""
    output = b""
    with subprocess.Popen(
        command, cwd=ROOT, env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        while some := os.read(process.stdout.fileno(), 1 << 16):
            output += some
            sys.stdout.buffer.write(some)
            sys.stdout.flush()
    _printed.append(output.decode("utf-8", "replace"))
    return process.returncode


def main() -> int:
    """Run the tests and the benchmark, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, where there is no GPU")
    parser.add_argument("--quick", action="store_true", help="without the benchmark")
    parser.add_argument("-k", default="", help="only tests whose names match, as pytest's -k")
    options = parser.parse_args()
    missing = [name for name in ("torch", "pytest", "psutil") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"needs {', '.join(missing)}", file=sys.stderr)
        return 2
    import torch

    if not options.rehearse and not torch.cuda.is_available():
        print("there is no GPU here that torch can use; --rehearse goes as far as a CPU does", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "table"
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]  # dpmon need not be installed
        env = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "DPMON_CHECK_TABLE": str(path),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        if options.rehearse:
            env["DPMON_CHECK_DEVICE"] = "cpu"
        # Warnings of another version of torch are no failures of dpmon.
        tests = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-rfEs", "-p", "no:cacheprovider", "-W", "default"]
        tests += ["--durations=12", *(["-k", options.k] if options.k else [])]
        if importlib.util.find_spec("pytest_timeout") is not None:
            tests.append("--timeout=300")
        status = passed_on([*tests, str(ROOT / "tests" / "gpu")], env)
        rows = read(path)
    if not options.quick:
        say("\nthe tracer's cost on the CPU of this machine:")
        bench = [sys.executable, str(ROOT / "tests" / "benchmarks" / "bench_inside.py"), "--cases", "usual", "dp2"]
        status = passed_on(bench, env) or status
    say("\n".join(["", *machine(), "", *table(rows)]))
    if os.environ.get("OUT"):
        out = Path(os.environ["OUT"])
        (out / "check.txt").write_text("\n".join(_printed) + "\n")
        (out / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 1 if status else 0


if __name__ == "__main__":
    raise SystemExit(main())
