"""Files that start a run on a cluster: what they ask for, that their languages accept them, how a job is stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.cli import main
from headway.cluster.launch_files import TARGETS, LaunchOptions, LaunchTarget, render_launch_files
from headway.config import ResolvedConfig, load_config
from headway.errors import ConfigError

ROOT = Path(__file__).parents[2]
TWO_NODES = str(ROOT / "deploy" / "two_nodes.yaml")
ON_CLUSTER = LaunchOptions(source="/shared/two_nodes.yaml", directory="/shared", hosts=("node1", "node2"))
"""What the files in deploy/ were rendered with."""


def render(target: LaunchTarget, resolved: ResolvedConfig | None = None, options: LaunchOptions = ON_CLUSTER) -> str:
    (text,) = render_launch_files(target, resolved or load_config(TWO_NODES), options).values()
    return text


def directives(text: str) -> dict[str, str]:
    """Options of sbatch: it reads those before the first command alone."""
    head = text.partition("\nset ")[0]
    found = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", head, re.MULTILINE))
    assert len(found) == text.count("#SBATCH"), "an option behind a command is not read"
    return found


def check_syntax(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_files_in_deploy_are_what_launch_renders() -> None:
    assert (ROOT / "deploy" / "slurm.sbatch").read_text(encoding="utf-8") == render("slurm")
    stored, stored_job = yaml.safe_load_all((ROOT / "deploy" / "rayjob.yaml").read_text(encoding="utf-8"))
    config, job = yaml.safe_load_all(render("kubernetes"))
    assert stored_job == job
    left, right = (load_config(yaml.safe_load(one["data"]["run.yaml"])).given() for one in (stored, config))
    assert left == right


def test_a_slurm_job_asks_for_the_machines_of_the_configuration() -> None:
    text = render("slurm")
    check_syntax(text)
    asked = directives(text)
    assert (asked["nodes"], asked["gpus-per-node"], asked["ntasks-per-node"]) == ("2", "8", "1")
    assert asked["signal"] == "B:TERM@600" and asked["open-mode"] == "append" and "requeue" in asked
    assert "--head --node-ip-address" in text and "srun --overlap --nodes=1 --ntasks=1" in text
    assert "headway train /shared/two_nodes.yaml cluster.kind=ray cluster.address=auto" in text


def test_a_job_on_one_machine_starts_no_ray_and_a_job_without_gpus_asks_for_none() -> None:
    text = render("slurm", load_config(None, ["exp_name=My Run!", "device=cpu"]))
    check_syntax(text)
    asked = directives(text)
    assert asked["job-name"] == "my-run" and "gpus-per-node" not in asked and asked["nodes"] == "1"
    assert "ray" not in text.replace("array", "") and "srun" not in text


def test_a_rayjob_has_a_pod_for_each_node_and_the_configuration_in_it() -> None:
    config, job = yaml.safe_load_all(render("kubernetes"))
    spec = job["spec"]["rayClusterSpec"]
    (group,) = spec["workerGroupSpecs"]
    pods = [spec["headGroupSpec"]["template"]["spec"], group["template"]["spec"]]
    assert (job["kind"], config["kind"], group["replicas"]) == ("RayJob", "ConfigMap", 1)
    for pod in pods:
        (container,) = pod["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
        mounted = {one["name"] for one in container["volumeMounts"]}
        assert mounted == {one["name"] for one in pod["volumes"]} == {"shared", "config", "memory"}
        assert pod["terminationGracePeriodSeconds"] == 600
    assert "pkill -TERM" in pods[0]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert job["spec"]["entrypoint"] == "exec python3 -m headway train /config/run.yaml"
    inside = load_config(yaml.safe_load(config["data"]["run.yaml"]))
    outside = load_config(TWO_NODES, ["cluster.kind=ray"])
    assert inside.given() == outside.given(), "the run in the pod is the run of the file"


def test_a_directory_inside_a_pod_would_be_lost_so_the_volume_gets_it() -> None:
    config, job = yaml.safe_load_all(render("kubernetes", load_config(None, ["exp_name=one", "output_dir=runs/x"])))
    assert yaml.safe_load(config["data"]["run.yaml"])["output_dir"] == "/shared/runs/one"
    assert "workerGroupSpecs" not in job["spec"]["rayClusterSpec"], "one node is the head"


def test_hosts_are_as_many_as_nodes_and_this_machine_is_one() -> None:
    text = render("ssh")
    check_syntax(text)
    assert "hosts=(node1 node2)" in text and "--address=$head:6379" in text
    with pytest.raises(ConfigError, match="2 nodes"):
        render("ssh", options=LaunchOptions(source="x.yaml", hosts=("node1",)))
    with pytest.raises(ConfigError, match="are not this machine"):
        render("local")
    assert "exec python3 -m headway train x.yaml\n" in render(
        "local", load_config(), LaunchOptions(source="x.yaml", directory="/tmp")
    )


def test_names_with_blanks_stay_one_word() -> None:
    options = LaunchOptions(source="/a b/run.yaml", overrides=("exp_name=my run",), directory="/a b", hosts=("n",))
    for target in TARGETS:
        text = render(target, load_config(), options)
        if target != "kubernetes":
            check_syntax(text)
            assert "'/a b'" in text


def test_the_command_prints_or_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "slurm", TWO_NODES, "--time", "1:00:00", "--", "max_steps=5"]) == 0
    printed = capsys.readouterr().out
    assert "#SBATCH --time=1:00:00" in printed and f"train {TWO_NODES} max_steps=5 cluster.kind=ray" in printed
    assert main(["launch", "kubernetes", TWO_NODES, "--write", str(tmp_path)]) == 0
    assert (tmp_path / "two-nodes.yaml").is_file()
    assert main(["launch", "slurm", TWO_NODES, "num_nodes=0"]) == 2


STAND_IN = """#!/bin/bash
# Stands for `python -m headway train`: SIGTERM ends it with the code of a run that can go on.
trap 'sleep 0.2; echo saved; exit 75' TERM
echo "$@" > "$0.began"
while :; do sleep 0.05; done
"""


def test_sigterm_to_a_slurm_job_stops_the_run_and_puts_the_job_back(tmp_path: Path) -> None:
    def write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
        return str(tmp_path / name)

    python = write("run", STAND_IN)
    write("scontrol", f'#!/bin/bash\necho "$@" > {tmp_path}/requeued\n')
    options = LaunchOptions(source="x.yaml", directory=str(tmp_path), python=python)
    script = write("job", render("slurm", load_config(), options))
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    job = subprocess.Popen([script], env=environment, stdout=subprocess.PIPE, text=True)
    deadline_s = time.monotonic() + 20
    while not (tmp_path / "run.began").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    job.send_signal(signal.SIGTERM)
    job.send_signal(signal.SIGTERM)  # once more while the run saves
    out, _ = job.communicate(timeout=20)
    assert (job.returncode, out) == (75, "saved\n")
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_dockerfile_follows_the_usual_rules() -> None:
    found = instructions()
    by_word: dict[str, list[str]] = {}
    for word, rest in found:
        by_word.setdefault(word, []).append(rest)
    declared = dict(one.split("=", 1) for one in by_word["ARG"])
    assert declared["DEVICE"] == "cuda" and ":" in declared["BASE"] and "latest" not in declared["BASE"]
    assert by_word["FROM"] == ["${BASE}"]
    sources = [path for rest in by_word["COPY"] for path in rest.split()[:-1]]
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for path in sources:
        assert (ROOT / path).exists() and f"!{path}" in allowed, path
    assert all("--no-install-recommends" in rest and "rm -rf /var/lib/apt" in rest for rest in by_word["RUN"][:1])
    assert all("--no-cache-dir" in rest for rest in by_word["RUN"] if "pip install" in rest)
    assert by_word["USER"] == ["headway"] and by_word["ENTRYPOINT"] == ['["headway"]'], "SIGTERM reaches the run"
    extras: Any = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(declared["EXTRAS"].split(",")) <= set(extras)
    for rest in by_word["RUN"]:
        check_syntax(rest)
