from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from question import QUESTION, add, leave

agent = create_agent(ChatOpenAI(model="policy"), tools=[add])
messages = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})["messages"]
leave(messages[-1].content)
