"""Connects this process to a Ray cluster: an existing one, or one that is started on this machine for the run.

docs/cluster.md says which cluster an address names, and how devices are numbered over its nodes. If this process is
connected already, that connection is used as it is and left open. A cluster of our own ends with this process, however
it ends; Ray sees to that.

What each part of a run asks of a cluster is a `ResourceRequest`. The requests of all parts on one node of the run are
on one machine: as one bundle or, with GPUs, as a bundle for each GPU, so that who shares one is given the same.
"""

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from headway.errors import ConfigError
from headway.extras import import_optional
from headway.processes.child_process import count_usable_cores

LOCAL, AUTO = "local", "auto"
_KEY = "cluster.address"
_CONNECT_S = 3.0
_GPU_MEMORY_GIB = {
    "A10G": 22.0,
    "A100-40G": 39.0,
    "A100-80G": 79.0,
    "B200": 178.0,
    "H100": 79.0,
    "H200": 139.0,
    "H20": 95.0,
    "L4": 22.0,
    "L40S": 44.0,
}
"""Memory that is there to use, by the names that Ray gives to kinds of GPUs with one size of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRequest:
    """The resources that one part of a run needs."""

    node: int
    """Node of the run, not of the cluster: parts with the same number are on the same machine."""
    cpus: int
    gpus: float = 0.0
    device: int | None = None
    """Device of the run: parts with the same number are given the same GPU. `None`: any of its node."""

    @property
    def resources(self) -> dict[str, float]:
        return {"CPU": float(self.cpus)} | ({"GPU": self.gpus} if self.gpus else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """One machine of a cluster."""

    name: str
    cpus: float
    gpus: float
    gpu_memory_gib: float = 0.0
    """Memory of one GPU; 0: not known."""

    @property
    def resources(self) -> dict[str, float]:
        return {"CPU": self.cpus, "GPU": self.gpus}

    @property
    def text(self) -> str:
        return f"{self.name} ({format_resources(self.resources)})"


def group_into_bundles(requests: Mapping[str, ResourceRequest]) -> dict[int, dict[str, float]]:
    """Sum up the requests for each node of the run, in the order of the nodes."""
    found: dict[int, dict[str, float]] = {}
    for request in sorted(requests.values(), key=lambda request: request.node):
        bundle = found.setdefault(request.node, {})
        for kind, amount in request.resources.items():
            bundle[kind] = round(bundle.get(kind, 0.0) + amount, 4)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedGroup:
    """Resources that are reserved together."""

    strategy: str
    """How Ray places the bundles: `SPREAD` over machines, or `STRICT_PACK` on one."""
    bundles: Mapping[tuple[int, int | None], Mapping[str, float]]
    """Resources by node and device of the run."""


def group_for_reservation(requests: Mapping[str, ResourceRequest]) -> list[ReservedGroup]:
    """Return a group with a bundle for each node or, with GPUs, a group for each node with a bundle for each GPU."""
    if not any(request.gpus for request in requests.values()):
        bundles: dict[tuple[int, int | None], dict[str, float]] = {
            (node, None): bundle for node, bundle in group_into_bundles(requests).items()
        }
        return [ReservedGroup(strategy="SPREAD", bundles=bundles)]
    groups = []
    for node in sorted({request.node for request in requests.values()}):
        here = {name: request for name, request in requests.items() if request.node == node}
        devices = sorted(
            {request.device for request in here.values()}, key=lambda device: -1 if device is None else device
        )
        groups.append(
            ReservedGroup(
                strategy="STRICT_PACK",
                bundles={
                    (node, device): group_into_bundles({n: one for n, one in here.items() if one.device == device})[
                        node
                    ]
                    for device in devices
                },
            )
        )
    return groups


def check_resource_requests(
    requests: Mapping[str, ResourceRequest], nodes: Sequence[ClusterNode], *, address: str
) -> None:
    """Raise `ConfigError` for requests that these nodes could never fulfil, even if all of them were free."""
    bundles = group_into_bundles(requests)
    cluster = ", ".join(node.text for node in nodes)
    for kind, noun in (("GPU", "GPUs"), ("CPU", "CPU slots")):
        needed = sum(bundle.get(kind, 0.0) for bundle in bundles.values())
        total = sum(node.resources[kind] for node in nodes)
        if needed > total + 1e-6:
            _refuse(f"the run needs {needed:g} {noun}, and the Ray cluster has {total:g}: {cluster}", address)
        for number, bundle in bundles.items():
            most = max((node.resources[kind] for node in nodes), default=0.0)
            if bundle.get(kind, 0.0) > most + 1e-6:
                parts = ", ".join(name for name, request in requests.items() if request.node == number)
                problem = f"node {number} of the run ({parts}) needs {format_resources(bundle)} on one machine"
                _refuse(f"{problem}, and the Ray cluster has {cluster}", address)


def _refuse(problem: str, address: str) -> None:
    hint = "fewer devices in device_mapping, a smaller num_gpus_per_node, fewer num_threads, or a larger cluster"
    raise ConfigError(problem, key="cluster.address", value=address, hint=hint)


def format_resources(resources: Mapping[str, float]) -> str:
    """Write resources as text: `2 CPU, 1 GPU`."""
    return ", ".join(f"{amount:g} {kind}" for kind, amount in resources.items() if amount or kind == "CPU")


def check_ray_installed() -> None:
    """Raise `ConfigError` if Ray is not installed."""
    import_optional("ray", extra="ray", key="cluster.kind", value="ray", problem="Ray is not installed")


def resolve_address(address: str | None) -> str:
    """Return the address of the cluster to use."""
    return address or os.environ.get("RAY_ADDRESS", "") or LOCAL


def connect_to_ray(address: str, *, runtime_env: Mapping[str, Any], cpus: int = 0) -> bool:
    """Make this process a driver of the cluster. Returns false if it was connected already.

    Raises `ConfigError` quickly if there is no such cluster. `cpus` is the least number of CPU slots that a cluster of
    our own gets, whatever the machine has.
    """
    check_ray_installed()
    import ray

    if ray.is_initialized():
        return False
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if runtime_env:
        options["runtime_env"] = dict(runtime_env)
    if address == LOCAL:
        options |= {"address": LOCAL, "num_cpus": max(cpus, count_usable_cores()), "include_dashboard": False}
    else:
        _check_reachable(address)
        options["address"] = address
    try:
        if address == LOCAL:
            _run_on_lasting_thread(lambda: ray.init(**options))
        else:
            with _keep_sigterm_handler():
                ray.init(**options)
    except Exception as error:  # Ray has no common type for what is wrong with an address, a version or an environment
        with suppress(Exception):
            ray.shutdown()
        raise _make_error(address, runtime_env, error) from error
    return True


def list_nodes() -> tuple[ClusterNode, ...]:
    """Return the living nodes of the cluster that this process is connected to."""
    import ray

    return tuple(
        ClusterNode(
            name=str(found["NodeManagerAddress"]),
            cpus=float(found["Resources"].get("CPU", 0.0)),
            gpus=float(found["Resources"].get("GPU", 0.0)),
            gpu_memory_gib=_find_gpu_memory(found["Resources"]),
        )
        for found in ray.nodes()
        if found["Alive"]
    )


def _find_gpu_memory(resources: Mapping[str, float]) -> float:
    """Return the memory of a node's GPUs by the name that Ray has for them; 0 for names with several sizes."""
    kinds = [name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")]
    return min((_GPU_MEMORY_GIB.get(kind, 0.0) for kind in kinds), default=0.0)


def describe_this_machine() -> ClusterNode:
    """Return what a cluster of our own would have here."""
    gpus, memory = 0, 0.0
    try:
        import torch

        gpus = torch.cuda.device_count()
        memory = min((torch.cuda.get_device_properties(one).total_memory for one in range(gpus)), default=0) / (1 << 30)
    except (ImportError, RuntimeError, AssertionError):
        pass
    return ClusterNode(name="this machine", cpus=float(count_usable_cores()), gpus=float(gpus), gpu_memory_gib=memory)


def disconnect_from_ray() -> None:
    """Disconnect. A cluster of our own ends. Idempotent."""
    import ray

    ray.shutdown()


def _run_on_lasting_thread(start: Callable[[], object]) -> None:
    """Run `start` on a thread that stays: the kernel ends the cluster with the thread that made its processes."""
    done: Future[None] = Future()

    def keep() -> None:
        try:
            start()
        except BaseException as error:
            done.set_exception(error)
            return
        done.set_result(None)
        threading.Event().wait()

    threading.Thread(target=keep, name="ray", daemon=True).start()
    done.result()


def _check_reachable(address: str) -> None:
    """Raise `ConfigError` if nothing listens at the address: Ray itself would wait for half a minute."""
    if address == AUTO:
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not (host and port.isdigit()):
        raise ConfigError(
            "is no address of the head of a Ray cluster", key=_KEY, value=address, hint="host:port, auto or local"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise ConfigError(
            f"nobody answers there: {error}",
            key=_KEY,
            value=address,
            hint="the address that `ray start --head` printed; RAY_ADDRESS is used where cluster.address is left out",
        ) from error


def _make_error(address: str, runtime_env: Mapping[str, Any], error: Exception) -> ConfigError:
    text = " ".join(str(error).split())[:400]
    if isinstance(error, ValueError | TypeError) and runtime_env:
        return ConfigError(text, key="cluster.runtime_env", value=dict(runtime_env))
    hint = "start it with `ray start --head`, or cluster.address: local"
    return ConfigError(f"cannot be joined: {text}", key=_KEY, value=address, hint=hint)


@contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Give SIGTERM back to its handler: Ray takes it for itself."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if main and before is not None:
            signal.signal(signal.SIGTERM, before)
