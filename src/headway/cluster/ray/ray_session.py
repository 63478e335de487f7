"""The connection of this process to a Ray cluster: an existing one, or one that is started on this machine for it.

An address is `host:port` of the head, `auto` for the cluster that this machine is a node of, or `local` for one of our
own. Left out, it is what `RAY_ADDRESS` says, which Ray sets inside a submitted job, else `local`. What was connected
already by somebody else is used as it is and left connected.

A cluster of our own ends with this process, however that ends; Ray sees to it.
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
_KNOCK_S = 3.0


def check_ray_installed() -> None:
    """Raises `ConfigError` where Ray is not there."""
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "Ray is not installed", key="cluster.kind", value="ray", hint="pip install 'headway[ray]'"
        ) from error


def resolve_address(address: str | None) -> str:
    """Which cluster is meant."""
    return address or os.environ.get("RAY_ADDRESS", "") or LOCAL


def connect_to_ray(address: str, *, runtime_env: Mapping[str, Any], cpus: int = 0) -> bool:
    """Be a driver of that cluster. Raises `ConfigError` when there is none, quickly; false: it was connected already.

    `cpus`: the least that a cluster of our own has, whatever the machine has.
    """
    check_ray_installed()
    import ray

    if ray.is_initialized():
        return False
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if runtime_env:
        options["runtime_env"] = dict(runtime_env)
    if address == LOCAL:
        options |= {"address": LOCAL, "num_cpus": max(cpus, _cores()), "include_dashboard": False}
    else:
        _knock(address)
        options["address"] = address
    try:
        if address == LOCAL:
            _kept(lambda: ray.init(**options))
        else:
            with _own_signals():
                ray.init(**options)
    except Exception as error:  # Ray has no common type for what is wrong with an address, a version or an environment
        with suppress(Exception):
            ray.shutdown()
        raise _refusal(address, runtime_env, error) from error
    return True


def list_nodes() -> tuple[ClusterNode, ...]:
    """Of the cluster that this process is connected to, those that live."""
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
    """What a cluster of our own would have here."""
    try:
        import torch

        gpus = torch.cuda.device_count()
    except ImportError:
        gpus = 0
    return ClusterNode(name="this machine", cpus=float(_cores()), gpus=float(gpus))


def disconnect_from_ray() -> None:
    """A cluster of our own ends here. Idempotent."""
    import ray

    ray.shutdown()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _kept(start: Callable[[], object]) -> None:
    """On a thread that stays: the kernel ends the processes of a cluster together with the thread that made them."""
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


def _knock(address: str) -> None:
    """Whether anybody answers there: Ray itself would wait for half a minute."""
    if address == AUTO:
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not (host and port.isdigit()):
        raise ConfigError(
            "is no address of the head of a Ray cluster", key=_KEY, value=address, hint="host:port, auto or local"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()
    except OSError as error:
        raise ConfigError(
            f"nobody answers there: {error}",
            key=_KEY,
            value=address,
            hint="the address that `ray start --head` printed; RAY_ADDRESS is used where cluster.address is left out",
        ) from error


def _refusal(address: str, runtime_env: Mapping[str, Any], error: Exception) -> ConfigError:
    text = " ".join(str(error).split())[:400]
    if isinstance(error, ValueError | TypeError) and runtime_env:
        return ConfigError(text, key="cluster.runtime_env", value=dict(runtime_env))
    hint = "start it with `ray start --head`, or cluster.address: local"
    return ConfigError(f"cannot be joined: {text}", key=_KEY, value=address, hint=hint)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself; whoever had it gets it back."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if main and before is not None:
            signal.signal(signal.SIGTERM, before)
