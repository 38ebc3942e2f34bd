"""What the clients ask: a person to extract, and the weather of cities, which a function knows.

`BOTH` is answered by a script (run.py): text and two calls, then an answer that uses both results.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Closed(BaseModel):
    """No other keys: the small model that is asked would not stop inventing some."""

    model_config = ConfigDict(extra="forbid")


class Pet(Closed):
    """A pet."""

    kind: Literal["cat", "dog"]
    name: Annotated[str, Field(max_length=12)]


class Person(Closed):
    """A person with pets."""

    name: Annotated[str, Field(max_length=16)]
    age: Annotated[int, Field(ge=0, le=150)]
    pets: Annotated[list[Pet], Field(max_length=2)]


PROMPT = "Ada is 36 years old and has a cat named Turing."
QUESTION = "What is the weather in Paris?"
BOTH = "What is the weather in Paris and in Rome?"
DEGREES = {"Paris": 21, "Rome": 34}
NOTE = "Get the current weather of a city."


class Weather:
    """The function of an agent, with the cities that it was called for."""

    def __init__(self) -> None:
        self.cities: list[str] = []

    def get_weather(self, city: str) -> str:
        """Get the current weather of a city."""
        self.cities.append(city)
        return json.dumps({"temperature": DEGREES.get(city, 0), "sky": "sunny"})

    def check(self, question: str, answer: str | None) -> None:
        """The function has run for each city of the question, and the answer says what it returned."""
        assert sorted(self.cities) == [city for city in DEGREES if city in question], self.cities
        assert answer is not None
        assert all(str(DEGREES[city]) in answer for city in self.cities), answer
