"""Directories of runs as the dashboard finds them."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path

from headway.cli import main
from tests.cli.factory import TINY

SCRIPT = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
"""A text that must stay one."""


def make_simulated_run(directory: Path, *words: str) -> None:
    """Simulate a run of a few steps into a directory."""
    assert main(["simulate", *TINY, "--steps", "10", "--out", str(directory), "--json", *words]) == 0


def add_samples(directory: Path, steps: int = 12) -> None:
    """Write groups, answers and images as runs do, with texts that a browser could mistake for its own language."""
    with (directory / "groups.jsonl").open("w") as log:
        log.writelines(json.dumps(make_group(step)) + "\n" for step in range(1, steps + 1))
    with (directory / "samples.jsonl").open("w") as log:
        for step in range(0, steps, 4):
            row = {"step": step, "kind": "held_out", "prompt": "6 × 7 = ?", "answer": f"it is {36 + step}"}
            log.write(json.dumps({**row, "reward": step / steps, "finish": "stop"}) + "\n")
    with (directory / "images.jsonl").open("w") as log:
        for step in (0, 5):
            row = {"step": step, "prompt": f"a sign {SCRIPT}", "reward": 0.1 * step, "png": make_png(step * 40)}
            log.write(json.dumps(row) + "\n")


def make_group(step: int) -> dict[str, object]:
    """A group of three members of two turns, one of which writes a script."""
    members = [make_member(step, number) for number in range(3)]
    prompt = f"task of step {step} {SCRIPT}"
    base = {"step": step, "group": 100 + step, "task": step % 5, "domain": "default", "prompt": prompt}
    return {**base, "expected": "42", "members": members, "size": 3}


def make_member(step: int, number: int) -> dict[str, object]:
    tokens = ["The ", "answer ", SCRIPT if number == 1 else f"is {step}", "."]
    turn = {"observation": f"<user>{SCRIPT}", "tokens": tokens, "logps": [-0.1, -0.5, -4.0, 0.0], "left_out": 0}
    turns = [{**turn, "versions": [[step - 2, 2], [step - 1, 2]]}, {**turn, "versions": [[step - 1, 4]], "reward": 0.5}]
    known = {"sample": f"{100 + step}.{number}", "reward": number / 2, "parts": {"math": number / 2, "form": 0.0}}
    return {**known, "advantage": number - 1.0, "lag": step % 3, "length": 8, "finish": "stop", "turns": turns}


def make_png(shade: int) -> str:
    """A picture of two times two dots, in base64."""
    rows = b"".join(b"\0" + bytes([shade, 100, 200] * 2) for _ in range(2))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 2, 8, 2, 0, 0, 0))
    png = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return base64.b64encode(png).decode()
