"""An MCP server with one tool, a calculator, over standard input and output.

mcp_agent.py starts it. It needs the `mcp` package.
"""

import asyncio

from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.types import CallToolResult, ListToolsResult, TextContent, Tool

# The embedded model knows one tool, described in these words. Other words make another prompt.
CALCULATOR = Tool(
    name="calculator",
    description="Evaluates arithmetic.",
    input_schema={
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "The expression."}},
        "required": ["expression"],
    },
    output_schema={"type": "string"},
)


def calculate(expression: str) -> str:
    """Return the value of an expression of digits and operators."""
    if (
        not set(expression) <= set("0123456789+-*/(). ")
        or len(expression) > 100
        or "**" in expression
    ):
        return "Error: digits, + - * / and brackets only"
    try:
        return f"{eval(expression):g}"  # digits and operators alone
    except Exception as error:
        return f"Error: {error}"


async def listed(context, params) -> ListToolsResult:
    return ListToolsResult(tools=[CALCULATOR])


async def called(context, params) -> CallToolResult:
    text = calculate(str((params.arguments or {}).get("expression", "")))
    return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=text)


async def main() -> None:
    server = Server("calculator", on_list_tools=listed, on_call_tool=called)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


asyncio.run(main())
