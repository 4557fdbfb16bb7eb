"""An MCP server with one tool, a calculator, made with the official package.

    python experiments/mcp_tools/calculator_server.py [PORT]

It serves over standard input and output, or over streamable HTTP on a port of this machine. From
rlkit it uses only the arithmetic.
"""

import sys
from typing import Annotated

from mcp.server.mcpserver import MCPServer
from pydantic import Field

from rlkit.environments import calculator as exact

server = MCPServer("calculator", log_level="ERROR")


@server.tool(structured_output=False)
def calculator(expression: Annotated[str, Field(description="The expression.")]) -> str:
    """Evaluates arithmetic."""
    try:
        return exact(expression)
    except (
        ValueError
    ) as error:  # the package hides what an exception says, and the policy should read it
        return f"Error: {error}."


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(transport="streamable-http", port=int(sys.argv[1]))
    server.run(transport="stdio")
