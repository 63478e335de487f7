"""An agent that knows nothing of Headway: it adds two numbers, and is told when it is wrong.

It talks to an OpenAI-compatible endpoint, any of them, and returns what its conversation was worth. `docs/serving.md`
says how to train it; alone it asks whatever `OPENAI_BASE_URL` and `OPENAI_API_KEY` say:

    headway serve tiny-sums --port 8000 &
    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python examples/openai_agent.py tiny-sums
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

TRIES = 2


async def solve(base_url: str, api_key: str, model: str, task: dict[str, Any]) -> float:
    """One conversation about one sum; 1 for the right answer, less for the second try and for being far off."""
    dice = random.Random(task["seed"])
    left, right = dice.randrange(10), dice.randrange(10)
    messages: list[Any] = [{"role": "user", "content": f"{left}+{right}="}]
    worth = 0.0
    http = DefaultAsyncHttpxClient(verify=False)  # plain http, on this machine: no certificates to load
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
        for attempt in range(TRIES):
            reply = await client.chat.completions.create(model=model, messages=messages, max_tokens=8)
            message = reply.choices[0].message
            worth = max(worth, _close(message.content or "", left + right) * 0.5**attempt)
            if worth == 0.5**attempt:
                break
            messages += [message, {"role": "user", "content": "No."}]
    return worth


def _close(said: str, wanted: int) -> float:
    return 1 / (1 + abs(int(said) - wanted)) if said.strip().isdecimal() else 0.0


async def main(model: str) -> None:
    """The mean over some conversations."""
    where, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    worths = await asyncio.gather(*(solve(where, key, model, {"seed": seed}) for seed in range(20)))
    print(f"{sum(worths) / len(worths):.2f}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
