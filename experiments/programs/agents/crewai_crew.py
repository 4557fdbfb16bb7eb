from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from question import QUESTION, add, leave

helper = Agent(
    role="helper", goal="Answer.", backstory="A clerk.", llm=LLM("openai/policy"), tools=[tool(add)]
)
task = Task(description=QUESTION, expected_output="A number.", agent=helper)
leave(Crew(agents=[helper], tasks=[task]).kickoff().raw)
