"""Connects this process to a Ray cluster: an existing one, or one that is started on this machine for the run.

An address is `host:port` of the head, `auto` for the cluster that this machine is a node of, or `local` for a cluster
of our own. If it is left out, `RAY_ADDRESS` counts, which Ray sets inside a submitted job, else `local`. If this
process is connected already, that connection is used as it is and left open.

A cluster of our own ends with this process, however it ends; Ray sees to that.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

from headway.cluster.ray.resource_requests import ClusterNode
from headway.errors import ConfigError

LOCAL, AUTO = "local", "auto"
_KEY = "cluster.address"
_CONNECT_S = 3.0


def check_ray_installed() -> None:
    """Raise `ConfigError` if Ray is not installed."""
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "Ray is not installed", key="cluster.kind", value="ray", hint="pip install 'headway[ray]'"
        ) from error


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
        options |= {"address": LOCAL, "num_cpus": max(cpus, _count_cores()), "include_dashboard": False}
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
        )
        for found in ray.nodes()
        if found["Alive"]
    )


def describe_this_machine() -> ClusterNode:
    """Return what a cluster of our own would have here."""
    try:
        import torch

        gpus = torch.cuda.device_count()
    except ImportError:
        gpus = 0
    return ClusterNode(name="this machine", cpus=float(_count_cores()), gpus=float(gpus))


def disconnect_from_ray() -> None:
    """Disconnect. A cluster of our own ends. Idempotent."""
    import ray

    ray.shutdown()


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
