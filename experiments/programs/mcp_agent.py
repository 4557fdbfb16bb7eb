"""An MCP client written without rlkit. It needs only the `mcp` package.

It starts a tool server, offers the server's tools to its model, and runs the called tools.
"""

import asyncio
import json
import os
import sys
import urllib.request
from pathlib import Path

from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

SERVER = Path(__file__).with_name("mcp_calculator.py")


def ask(messages: list, tools: list) -> dict:
    """Send a request and return the policy's message."""
    body = json.dumps({"model": "policy", "messages": messages, "tools": tools}).encode()
    headers = {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type": "application/json",
    }
    with urllib.request.urlopen(
        urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    ) as reply:
        return json.load(reply)["choices"][0]["message"]


def offered(tool) -> dict:
    """Return a server's tool in the form expected by chat templates.

    `return` is the schema of the tool's result, if the server has one.
    """
    result = {"return": tool.output_schema} if tool.output_schema else {}
    described = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": {**described, **result}}


async def main() -> None:
    messages = json.loads(os.environ["RLKIT_TASK"])["messages"]
    path = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}  # a server inherits little
    command = StdioServerParameters(command=sys.executable, args=[str(SERVER)], env=path)
    async with Client(stdio_client(command)) as server:
        tools = [offered(tool) for tool in (await server.list_tools()).tools]
        for _ in range(4):
            reply = ask(messages, tools)
            messages.append(reply)
            if not reply.get("tool_calls"):
                return
            for call in reply["tool_calls"]:
                try:
                    result = await server.call_tool(
                        call["function"]["name"], json.loads(call["function"]["arguments"])
                    )
                    text = "\n".join(block.text for block in result.content)
                except ValueError as error:  # arguments are not JSON
                    text = f"Error: {error}"
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})


asyncio.run(main())
