import asyncio
import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike
from question import QUESTION, add, leave

llm = OpenAILike(
    model="policy",
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    is_chat_model=True,
    is_function_calling_model=True,
)


async def main() -> None:
    leave(await FunctionAgent(tools=[add], llm=llm).run(QUESTION))


asyncio.run(main())
