"""Engines that run vLLM in their own processes (`in_process: true`), under an interpreter that has it.

A child of the run like any engine, started with what a server of our own would be started with (`headway.build.
servers`); weights come to it as to any engine. `engine` is what runs in that child: what it imports must be there
under vLLM's interpreter too.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.build.servers import Servers, cards_of, launch_of
from headway.build.transfer import EngineEnd
from headway.build.ways import Route
from headway.cluster.base import ChildSpec
from headway.cluster.interpreter import under
from headway.cluster.process import Child
from headway.errors import EngineCrashed, HeadwayError

if TYPE_CHECKING:
    from headway.engines.base import Engine
    from headway.engines.inside_vllm.llm import Llm

_START_S = 600.0
_LAST_WORDS_S = 0.2
"""Between the end of a vLLM and that of its process: answers to those who wait for it get through."""
_WORKER = "headway.build.inside_worker.Loading"


def make_inside(servers: Servers, route: Route) -> list[Engine]:
    """One for each replica; nothing is started yet."""
    from headway.engines.remote import RemoteEngine
    from headway.models import end_tokens

    python = servers.resolved.config.actor_infer.strategy_args.strategy_config.server_python
    spawn = None if python is None else under(python)
    start = partial(Child.start, timeout_s=_START_S, spawn=spawn)
    specs = [inside_spec(servers, route, number, end_tokens(servers.model)) for number in range(servers.replicas)]
    return [RemoteEngine(spec, servers.slots, start) for spec in specs]


def inside_spec(servers: Servers, route: Route, number: int, ends: Iterable[int]) -> ChildSpec:
    """Engine `number` as a child; `ends` are tokens that end an answer."""
    from headway.engines.servers.launch import vllm_environment

    name, launch = f"engine/{number}", launch_of(servers)
    return ChildSpec(
        name=name,
        target=f"{__name__}:engine",
        args={
            "name": name,
            "launch": {**asdict(launch), "extra": dict(launch.extra)},
            "ends": sorted(ends),
            "route": route.to_json(),
        },
        threads=max(servers.threads, 1),
        env={
            **vllm_environment(launch),
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            **cards_of(servers, number),
        },
        log=None if servers.logs is None else servers.logs / f"engine-{number}.log",
    )


async def engine(args: Mapping[str, Any]) -> Engine:
    """In the child: a vLLM that has come up. Raises `EngineCrashed` with what it has said, where it does not."""
    from headway.engines.inside_vllm.family import hold_together

    hold_together()
    return engine_over(make_llm(args), args)


def make_llm(args: Mapping[str, Any]) -> Llm:
    """Takes a while, and the loop with it."""
    from headway.engines.inside_vllm.llm import Llm
    from headway.engines.servers.launch import Launch

    begin = os.fstat(sys.stdout.fileno()).st_size
    try:
        return Llm(Launch(**args["launch"]), _WORKER, partial(_said, begin))
    except HeadwayError:
        raise
    except Exception as error:
        raise EngineCrashed(f"vLLM: {error}{_said(begin)}") from error


def engine_over(core: Llm, args: Mapping[str, Any]) -> Engine:
    """One replica, without weights."""
    from headway.engines.inside_vllm.engine import InsideEngine
    from headway.engines.servers.files import check_names
    from headway.engines.servers.launch import Launch
    from headway.weights.segment import Segment

    name, launch = args["name"], Launch(**args["launch"])
    return InsideEngine(
        name,
        core,
        slots=launch.slots,
        context_tokens=launch.context_tokens,
        room=Segment.create,
        check=lambda manifest: check_names(manifest, Path(launch.model)),
        read=EngineEnd.of(Route(**args["route"]), name, "cpu").read,
        ends=args["ends"],
        decode=core.decode,
        on_down=_leave,
    )


def _said(begin: int) -> str:
    """What vLLM has written since: it goes where our own output goes."""
    from headway.engines.servers.process import told

    sys.stdout.flush()
    with os.fdopen(os.dup(sys.stdout.fileno()), "rb", buffering=0) as output:
        return told(output, begin)


def _leave(why: str) -> None:
    """A process whose vLLM is gone is of no use, and its end is noticed at once."""
    print(why, file=sys.stderr, flush=True)
    asyncio.get_running_loop().call_later(_LAST_WORDS_S, os._exit, 1)
