import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from question import QUESTION, add, leave

client = OpenAIChatCompletionClient(
    model="policy",
    model_info={
        "vision": False,
        "function_calling": True,
        "json_output": False,
        "structured_output": False,
        "family": "unknown",
    },
)


async def main() -> None:
    agent = AssistantAgent("helper", client, tools=[add], reflect_on_tool_use=True)
    leave((await agent.run(task=QUESTION)).messages[-1].content)


asyncio.run(main())
