"""Prefix hits of a growing conversation with tools, on the default model over HTTP.

    python benchmarks/server/conversation.py [MODEL] [--turns 20] [--port 8124] [engine flags]

The script starts `slotzero serve` and has one conversation of chat completions with it. In every
turn the user asks, the model must call one of two tools (`tool_choice: required`), gets the result,
and answers; each reply is sent back as it came. It prints a table and a line of JSON: the share of
the prompt tokens that were found in the prefix cache, from the second turn on. The exit status is 1
if that is below 90 %.
"""

import argparse
import asyncio
import signal
import subprocess
import sys
from typing import Any

from overhead import slotzero, until_healthy

from slotzero.bench.http import Site
from slotzero.bench.sheets import Report, Sheet, print_sheets

WANTED = 0.9
MAX_TOKENS = 48
CITIES = ("Oslo", "Lima", "Rome", "Cairo", "Quito")
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Return the {name} of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": CITIES}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "population")
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--port", type=int, default=8124)
    args, flags = parser.parse_known_args()
    serve = slotzero("serve", *([args.model] if args.model else []))
    server = subprocess.Popen([*serve, "--port", str(args.port), *flags], stdout=subprocess.DEVNULL)
    try:
        counts = asyncio.run(conversation(Site("127.0.0.1", args.port, {}), args.turns))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)
    first, *later = counts
    num_prompt, num_found = (sum(values) for values in zip(*later, strict=True))
    report: Report = {
        "benchmark": "conversation",
        "model": args.model or "the default model",
        "turns": args.turns,
        "requests": 2 * args.turns,
        "first_turn_prompt_tokens": first[0],
        "last_turn_prompt_tokens": later[-1][0],
        "later_prompt_tokens": num_prompt,
        "later_cached_tokens": num_found,
        "hit_share": round(num_found / num_prompt, 4),
    }
    lines = [(name.replace("_", " "), f"{value}") for name, value in report.items()]
    print_sheets(report, [Sheet("a conversation with tools", lines)])
    return 0 if num_found >= WANTED * num_prompt else 1


async def conversation(site: Site, num_turns: int) -> list[tuple[int, int]]:
    """Return the prompt tokens of each turn, and how many of them were found."""
    await until_healthy(site)
    messages: list[Any] = [{"role": "system", "content": "You are a helpful assistant."}]
    counts = []
    for turn in range(num_turns):
        city = CITIES[turn % len(CITIES)]
        messages.append({"role": "user", "content": f"Turn {turn}: what can you say of {city}?"})
        asked = await reply(site, messages, "required")
        messages.append(asked["message"])
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": f"{turn + 7} (measured today)"}
            for call in asked["message"]["tool_calls"]
        ]
        answered = await reply(site, messages, "auto")
        messages.append(answered["message"])
        usages = (asked["usage"], answered["usage"])
        num_found = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        counts.append((sum(usage["prompt_tokens"] for usage in usages), num_found))
    await site.aclose()
    return counts


async def reply(site: Site, messages: list[Any], choice: str) -> dict[str, Any]:
    """Return the message with which the model continues, and its token counts."""
    body = {
        "messages": messages,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    made = await site.post("/v1/chat/completions", body)
    return {"message": made["choices"][0]["message"], "usage": made["usage"]}


if __name__ == "__main__":
    sys.exit(main())
