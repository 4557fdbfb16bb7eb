from magentic import OpenaiChatModel, prompt_chain
from question import QUESTION, add, leave


@prompt_chain("{question}", functions=[add], model=OpenaiChatModel("policy"))
def answer(question: str) -> str: ...


leave(answer(QUESTION))
