from agno.agent import Agent
from agno.models.openai import OpenAIChat
from question import QUESTION, add, leave

agent = Agent(model=OpenAIChat(id="policy"), tools=[add], telemetry=False)
leave(agent.run(QUESTION).content)
