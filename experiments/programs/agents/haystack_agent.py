from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from question import QUESTION, add, leave

agent = Agent(
    chat_generator=OpenAIChatGenerator(model="policy"), tools=[create_tool_from_function(add)]
)
leave(agent.run(messages=[ChatMessage.from_user(QUESTION)])["last_message"].text)
