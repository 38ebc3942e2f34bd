"""LangChain: `with_structured_output`, `bind_tools` whole and streamed, and its own agent."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

from asked import BOTH, NOTE, PROMPT, QUESTION, Person, Weather
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI


def main() -> None:
    chat = ChatOpenAI(
        base_url=f"{sys.argv[1]}/v1", model="tiny", temperature=0, max_tokens=200, max_retries=0
    )
    structured(chat)
    for ask in (invoked, streamed):
        bound(chat, ask, QUESTION, "required")
        bound(chat, ask, BOTH, "auto")
    for question in (QUESTION, BOTH):
        weather = Weather()
        agent = create_agent(chat, [tool_of(weather)])
        found = agent.invoke({"messages": [{"role": "user", "content": question}]})
        weather.check(question, found["messages"][-1].content)
    print(*(f"{name} {version(name)}" for name in ("langchain", "langchain-openai", "openai")))


def structured(chat: ChatOpenAI) -> None:
    for strict in (None, True):
        for method in ("json_schema", "function_calling"):
            found = chat.with_structured_output(Person, method=method, strict=strict).invoke(PROMPT)
            assert isinstance(found, Person), method
    schema = {**Person.model_json_schema(), "title": "person", "description": "A person."}
    for method in ("json_schema", "function_calling"):
        found = chat.with_structured_output(schema, method=method).invoke(PROMPT)
        assert Person.model_validate(found)
        both = chat.with_structured_output(Person, method=method, include_raw=True).invoke(PROMPT)
        assert both["parsing_error"] is None


def tool_of(weather: Weather) -> StructuredTool:
    return StructuredTool.from_function(weather.get_weather, description=NOTE)


def bound(chat: ChatOpenAI, ask: Any, question: str, first: str) -> None:
    """A loop with bound tools: the message goes back as it came."""
    weather = Weather()
    tool = tool_of(weather)
    messages: list[Any] = [HumanMessage(question)]
    message = ask(chat.bind_tools([tool], tool_choice=first), messages)
    assert message.tool_calls
    assert not message.invalid_tool_calls
    messages += [message, *(tool.invoke(call) for call in message.tool_calls)]
    answer = ask(chat.bind_tools([tool]), messages)
    weather.check(question, answer.content)


def invoked(chat: Any, messages: list[Any]) -> AIMessage:
    found: AIMessage = chat.invoke(messages)
    return found


def streamed(chat: Any, messages: list[Any]) -> AIMessage:
    total, *rest = chat.stream(messages)
    for chunk in rest:
        total += chunk
    return total  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
