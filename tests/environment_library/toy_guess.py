"""A taskset for `verifiers`, for the tests: its agent guesses a number, in process, and is told what was wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import verifiers.v1 as vf


class Data(vf.TaskData):
    secret: int


class GuessTask(vf.Task[Data]):
    @vf.reward
    async def guessed(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == str(self.data.secret))


class Guess(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self) -> Iterator[GuessTask]:
        for number in range(5):
            yield GuessTask(Data(prompt="Guess my number.", secret=number), self.config.task)


class Loop(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, *rest: Any, **more: Any
    ) -> Any:
        data = rest[1]
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(timeout=60, headers={"authorization": f"Bearer {secret}"}) as client:
            for _ in range(3):
                body = {"model": ctx.model, "messages": messages}
                answer = (await client.post(f"{endpoint}/chat/completions", json=body)).raise_for_status().json()
                said = answer["choices"][0]["message"]["content"]
                if said == "break":
                    raise RuntimeError("broken on purpose")
                if said.strip() == str(data.secret):
                    break
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"Not {said}."}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Guess", "Loop"]
