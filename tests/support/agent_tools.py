"""The tools, the question and the structured answer of the tests in tests/clients.

It is imported where Slotzero is not installed.
"""

from typing import Any, Literal

from pydantic import BaseModel

QUESTION = "How warm is Paris?"
ANSWER = "It is 3 degrees in Paris."
"""The last answer of scripted_server.py, when both tools were called."""
MODEL = "default"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
FUNCTIONS: Any = [
    {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
    {"name": "add", "parameters": {
        "type": "object", "required": ["a", "b"],
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}},
]  # fmt: skip


class Report(BaseModel):
    """What the weather is like."""

    is_warm: bool
    sky: Literal["clear", "cloudy"]


class Tools:
    """The two tools, which note their calls."""

    def __init__(self) -> None:
        self.called: list[tuple[object, ...]] = []

    def weather(self, city: str) -> str:
        """Return the weather of a city."""
        self.called.append(("weather", city))
        return f"3 degrees in {city}"

    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        self.called.append(("add", a, b))
        return a + b

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        tools = {"weather": self.weather, "add": self.add}
        return str(tools[name](**arguments))

    def check(self, answer: object) -> None:
        """Assert that the conversation ended as scripted_server.py has it."""
        assert self.called == [("weather", "Paris"), ("add", 1, 2)]
        assert answer == ANSWER
