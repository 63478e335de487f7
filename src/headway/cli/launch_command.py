"""`headway launch`: print the files that start a run on a cluster, with the machines of the configuration.

    headway launch slurm run.yaml -- max_steps=500                    # prints a batch script
    headway launch slurm run.yaml --write jobs && sbatch jobs/mine.sbatch
    headway launch kubernetes run.yaml --image registry/headway:1     # a RayJob for the KubeRay operator
    headway launch ssh run.yaml --hosts node1,node2

Nothing is started. Nodes and GPUs come from num_nodes, num_gpus_per_node and device_mapping. See docs/cluster.md.
"""

import argparse
import sys
from pathlib import Path

from headway.cli.command_line import at_least_one, load_run_config, split_arguments
from headway.cluster.launch_files import TARGETS, LaunchOptions, render_launch_files
from headway.errors import ConfigError

HELP = "print what starts a run on Slurm, Kubernetes or hosts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", choices=TARGETS, help="where the run is started")
    parser.add_argument("arguments", nargs="+", metavar="FILE|key=value", help="YAML file, then overrides")
    parser.add_argument("--write", type=Path, metavar="DIR", help="write the files into a directory")
    parser.add_argument("--directory", metavar="DIR", help="directory that all machines see; this one if left out")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has Headway on all machines")
    parser.add_argument("--cpus", type=at_least_one, default=0, metavar="N", help="CPUs of each machine")
    parser.add_argument("--grace", type=at_least_one, default=600, metavar="S", help="seconds from SIGTERM to the end")
    parser.add_argument("--time", default="24:00:00", help="slurm: time limit")
    parser.add_argument("--partition", default="", help="slurm: partition")
    parser.add_argument("--account", default="", help="slurm: account")
    parser.add_argument("--hosts", default="", metavar="A,B,…", help="ssh: the machines, the head first")
    parser.add_argument("--image", default="headway:latest", help="kubernetes: image that the Dockerfile made")
    parser.add_argument("--volume", default="headway", help="kubernetes: claim of a volume that all pods share")
    parser.add_argument("--memory", default="64Gi", help="kubernetes: memory of each pod")


def run_command(args: argparse.Namespace) -> int:
    """Check the configuration, and print or write the files."""
    resolved = load_run_config(args.arguments)
    source, overrides = split_arguments(args.arguments)
    if not isinstance(source, str):
        raise ConfigError("machines of a cluster read a file", key="FILE", value=args.arguments[0])
    options = LaunchOptions(
        source=str(Path(source).absolute()),
        overrides=overrides,
        directory=str(Path(args.directory or ".").absolute()),
        python="python3" if args.target == "kubernetes" and args.python == sys.executable else args.python,
        hosts=[host for host in args.hosts.split(",") if host],
        time=args.time,
        partition=args.partition,
        account=args.account,
        grace_s=args.grace,
        cpus=args.cpus,
        memory=args.memory,
        image=args.image,
        volume=args.volume,
    )
    for name, text in render_launch_files(args.target, resolved, options).items():
        if args.write is None:
            print(text, end="")
            continue
        args.write.mkdir(parents=True, exist_ok=True)
        path = args.write / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o644 if name.endswith(".yaml") else 0o755)
        print(path)
    return 0
