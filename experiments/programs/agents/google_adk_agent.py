import asyncio

from google.adk.agents import Agent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from question import QUESTION, add, leave

agent = Agent(name="helper", model=LiteLlm("openai/policy"), tools=[add])


async def main() -> None:
    events = await InMemoryRunner(agent).run_debug(QUESTION, quiet=True)
    leave("".join(part.text or "" for part in events[-1].content.parts))


asyncio.run(main())
