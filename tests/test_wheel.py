"""A wheel is built, installed into an empty environment without its dependencies, and has everything it needs."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
USE = """
import sys; sys.path.append({site!r})  # dependencies are those of the environment that tests
import headway
assert {target!r} in headway.__file__, headway.__file__
from headway.cli import main
assert main(["simulate", {example!r}, "--steps", "1", "--json", "--out", {out!r}]) == 0
assert main(["init", {project!r}]) == 0
"""


@pytest.mark.docs
def test_a_wheel_is_built_installed_and_used(tmp_path: Path) -> None:
    pytest.importorskip("build")
    built = tmp_path / "dist"
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(built), str(ROOT)], check=True, timeout=600)
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert source.stat().st_size > 100_000
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True, timeout=300)
    site = str(Path(pytest.__file__).parents[1])
    example, out = str(ROOT / "examples" / "simulate_small.yaml"), str(tmp_path / "out")
    use = USE.format(site=site, target=str(tmp_path), example=example, out=out, project=str(tmp_path / "project"))
    subprocess.run([python, "-c", use], check=True, timeout=300, cwd=tmp_path)
