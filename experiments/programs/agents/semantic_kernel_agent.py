import asyncio

from question import QUESTION, add, leave
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import KernelPlugin, kernel_function

plugin = KernelPlugin("sums", functions=[kernel_function(add)])


async def main() -> None:
    agent = ChatCompletionAgent(
        service=OpenAIChatCompletion(ai_model_id="policy"), name="helper", plugins=[plugin]
    )
    leave((await agent.get_response(messages=QUESTION)).content)


asyncio.run(main())
