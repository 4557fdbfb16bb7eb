from pydantic_ai import Agent
from question import QUESTION, add, leave

agent = Agent("openai-chat:policy", tools=[add])
leave(agent.run_sync(QUESTION).output)
