"""Renders the files that start a run on a cluster: a Slurm job, a RayJob for Kubernetes, or commands over ssh.

    files = render_launch_files("slurm", resolved, LaunchOptions(source="run.yaml", directory="/shared/me"))

Machines and GPUs are those of the configuration (`num_nodes`, `num_gpus_per_node`). A run on one machine needs no Ray,
unless the configuration asks for it; on several, the files start a Ray cluster and the run joins it. Templates are text
with `{{ name }}`: a name without a value is an error. Nothing is started or written here.
"""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

import yaml

from headway.config import ResolvedConfig
from headway.errors import ConfigError

LaunchTarget = Literal["slurm", "kubernetes", "ssh", "local"]
TARGETS: tuple[LaunchTarget, ...] = ("slurm", "kubernetes", "ssh", "local")
_CPUS_PER_GPU = 8
_PORT = 6379
_MOUNT = "/shared"
_PLACEHOLDER = re.compile(r"\{\{ (\w+) \}\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """What a cluster needs to know beside the configuration."""

    source: str
    """The configuration, as the command line names it."""
    overrides: Sequence[str] = ()
    directory: str = "."
    """Directory that every machine sees, in which the run is started."""
    python: str = "python3"
    """Interpreter that has Headway, on every machine."""
    hosts: Sequence[str] = ()
    """ssh: the machines, the head first."""
    time: str = "24:00:00"
    """slurm: time limit of the job."""
    partition: str = ""
    account: str = ""
    grace_s: int = 600
    """Seconds from SIGTERM to the end: a step and a checkpoint have to fit."""
    cpus: int = 0
    """CPUs of each machine; 0: eight for each GPU, or four."""
    memory: str = "64Gi"
    """kubernetes: memory of each pod."""
    image: str = "headway:latest"
    """kubernetes: image that the Dockerfile made."""
    volume: str = "headway"
    """kubernetes: claim of a volume that all pods share."""
    retries: int = 10
    """kubernetes: how often a run that was stopped is started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Machines of a run."""

    name: str
    nodes: int
    gpus: int
    cpus: int

    @property
    def title(self) -> str:
        devices = f"{self.gpus} GPU{'' if self.gpus == 1 else 's'} and " if self.gpus else ""
        return f"{self.name}: {self.nodes} node{'' if self.nodes == 1 else 's'}, each with {devices}{self.cpus} CPUs"

    @property
    def ray_resources(self) -> str:
        return f"--num-cpus={self.cpus}" + (f" --num-gpus={self.gpus}" if self.gpus else "")


def render_launch_files(target: LaunchTarget, resolved: ResolvedConfig, options: LaunchOptions) -> dict[str, str]:
    """Return the text of each file by its name. Raises `ConfigError` for a target that cannot run the configuration."""
    shape = _find_shape(resolved, options)
    if target == "slurm":
        return {f"{shape.name}.sbatch": _render_slurm(resolved, options, shape)}
    if target == "kubernetes":
        return {f"{shape.name}.yaml": _render_kubernetes(resolved, options, shape)}
    if target == "ssh":
        return {f"{shape.name}.sh": _render_ssh(resolved, options, shape)}
    if shape.nodes > 1 and resolved.config.cluster.kind == "local":
        problem = f"{shape.nodes} nodes are not this machine"
        raise ConfigError(problem, key="num_nodes", value=shape.nodes, hint="launch slurm, kubernetes or ssh")
    words = shlex.join([*_train_command(options), *options.overrides])
    text = f"#!/bin/bash\n# {shape.title}\ncd {shlex.quote(options.directory)} || exit 2\nexec {words}\n"
    return {f"{shape.name}.sh": text}


def _find_shape(resolved: ResolvedConfig, options: LaunchOptions) -> _Shape:
    derived, config = resolved.derived, resolved.config
    gpus = 0 if config.device == "cpu" else derived.num_gpus_per_node
    slots = derived.num_gpus_per_node if config.device == "cpu" else 4
    name = re.sub(r"[^a-z0-9-]+", "-", config.exp_name.lower()).strip("-")[:50] or "headway"
    return _Shape(name=name, nodes=derived.num_nodes, gpus=gpus, cpus=options.cpus or gpus * _CPUS_PER_GPU or slots)


def _train_command(options: LaunchOptions, source: str = "") -> list[str]:
    return [options.python, "-m", "headway", "train", source or options.source]


def _cluster_overrides(resolved: ResolvedConfig, shape: _Shape) -> list[str]:
    """Return the options by which the run joins the Ray cluster that the files start."""
    return ["cluster.kind=ray", "cluster.address=auto"] if _needs_ray(resolved, shape) else []


def _needs_ray(resolved: ResolvedConfig, shape: _Shape) -> bool:
    return shape.nodes > 1 or resolved.config.cluster.kind == "ray"


def _render_slurm(resolved: ResolvedConfig, options: LaunchOptions, shape: _Shape) -> str:
    directives = {
        "job-name": shape.name,
        "nodes": shape.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": shape.cpus,
        "gpus-per-node": shape.gpus or None,
        "mem": 0,
        "time": options.time,
        "partition": options.partition or None,
        "account": options.account or None,
        "signal": f"B:TERM@{options.grace_s}",
        "open-mode": "append",
        "output": f"{shape.name}-%j.log",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in directives.items() if value is not None]
    cluster = ""
    if _needs_ray(resolved, shape):
        python, start_s = shlex.quote(options.python), int(resolved.config.cluster.start_timeout_s)
        waiting = _render("await_nodes", python=python, start_s=start_s, nodes=shape.nodes)
        cluster = _render(
            "slurm_cluster",
            port=_PORT,
            python=python,
            resources=shape.ray_resources,
            workers=shape.nodes - 1,
            await_nodes=waiting.strip(),
        )
        if shape.nodes == 1:
            cluster = re.sub(r"srun [^&]*&\n", "", cluster)
    command = [*_train_command(options), *options.overrides, *_cluster_overrides(resolved, shape)]
    return _render(
        "slurm_job",
        title=shape.title,
        name=shape.name,
        directives="\n".join([*lines, "#SBATCH --requeue"]),
        directory=shlex.quote(options.directory),
        cluster=cluster,
        command=shlex.join(command),
        grace_s=options.grace_s,
    )


def _render_ssh(resolved: ResolvedConfig, options: LaunchOptions, shape: _Shape) -> str:
    if len(options.hosts) != shape.nodes:
        problem = f"the configuration has {shape.nodes} nodes"
        raise ConfigError(problem, key="--hosts", value=",".join(options.hosts), hint="as many hosts, the head first")
    command = [*_train_command(options), *options.overrides, "cluster.kind=ray", "cluster.address=auto"]
    return _render(
        "ssh_nodes",
        title=shape.title,
        hosts=shlex.join(options.hosts),
        directory=shlex.quote(options.directory),
        python=shlex.quote(options.python),
        port=_PORT,
        resources=shape.ray_resources,
        quoted_command=shlex.quote(f"cd {shlex.quote(options.directory)} && {shlex.join(command)}"),
    )


def _render_kubernetes(resolved: ResolvedConfig, options: LaunchOptions, shape: _Shape) -> str:
    config: dict[str, Any] = {key: value for key, value in resolved.given().items() if value not in (None, [], {})}
    if not str(resolved.config.output_dir).startswith("/"):
        config["output_dir"] = f"{_MOUNT}/runs/{shape.name}"
    for override in _cluster_overrides(resolved, shape):
        key, _, value = override.partition("=")
        config[key] = value
    config.pop("cluster.address", None)  # inside a job Ray says where the cluster is
    workers = ""
    if shape.nodes > 1:
        pod = textwrap.indent(_render_pod(options, shape, "ray-worker").rstrip(), " " * 12)
        workers = _render("kubernetes_workers", count=shape.nodes - 1, pod=pod)
    return _render(
        "kubernetes_rayjob",
        title=shape.title,
        name=shape.name,
        config=textwrap.indent(yaml.safe_dump(config, sort_keys=False, allow_unicode=True).rstrip(), " " * 4),
        entrypoint=json.dumps("exec " + shlex.join(_train_command(options, "/config/run.yaml"))),
        retries=options.retries,
        head=textwrap.indent(_render_pod(options, shape, "ray-head").rstrip(), " " * 10),
        workers=workers,
    )


_STOP_RUN = "pkill -TERM -f ' [-]m headway train'; while pgrep -f ' [-]m headway train' > /dev/null; do sleep 1; done"
"""Command of the head before its pod ends: Kubernetes sends SIGTERM to the first process of a container alone."""


def _render_pod(options: LaunchOptions, shape: _Shape, role: str) -> str:
    resources = {"cpu": str(shape.cpus), "memory": options.memory}
    if shape.gpus:
        resources["nvidia.com/gpu"] = str(shape.gpus)
    hook = {"preStop": {"exec": {"command": ["/bin/sh", "-c", _STOP_RUN]}}}
    return _render(
        "kubernetes_pod",
        role=role,
        name=shape.name,
        image=options.image,
        grace_s=options.grace_s,
        resources=json.dumps(resources),
        mount=_MOUNT,
        volume=options.volume,
        lifecycle=f"    lifecycle: {json.dumps(hook)}" if role == "ray-head" else "",
    )


def _render(template: str, **values: object) -> str:
    text = (files("headway.cluster") / "templates" / f"{template}.txt").read_text(encoding="utf-8")
    return re.sub(r"\n\n\n+", "\n\n", _PLACEHOLDER.sub(lambda match: str(values[match[1]]), text))
