import instructor
from openai import OpenAI
from pydantic import BaseModel
from question import QUESTION, leave


class Answer(BaseModel):
    """The number that was asked for."""

    number: int


answer = instructor.from_openai(OpenAI()).chat.completions.create(
    model="policy", response_model=Answer, messages=[{"role": "user", "content": QUESTION}]
)
leave(answer.number)
