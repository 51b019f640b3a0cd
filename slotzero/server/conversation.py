"""One request for an answer, whichever of the APIs it came from.

Chat completions, Responses, Messages and Ollama's chat convert their requests to a Conversation;
answer_plan.py makes a prompt and a format of it. It knows neither tokens nor the model.

The rule: errors name the client's own field, so a conversation knows what it is called there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slotzero.sampling.structured import StructuredOutputs


@dataclass(frozen=True)
class ToolSpec:
    """A function that the model may call."""

    name: str
    schema: Mapping[str, Any] | None
    """JSON schema of its arguments."""
    is_strict: bool
    shown: Mapping[str, Any]
    """The tool as chat templates expect it."""


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, and what the model may do with them."""

    specs: Sequence[ToolSpec] = ()
    choice: str = "auto"
    """auto, none, required, or `named` for the tool `name`."""
    name: str = ""
    is_parallel: bool = True


ANY = "any"
"""An effort that leaves it to the template how much to reason."""


@dataclass(frozen=True)
class TemplateOptions:
    """What a request tells the chat template, besides messages and tools."""

    variables: Mapping[str, Any] = field(default_factory=dict)
    effort: str | None = None
    """How much to reason; `none` switches reasoning off. None: as the template does by itself."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str | None = None
    """A template in place of the model's."""
    max_prompt_tokens: int | None = None
    """Keep only the last tokens of the prompt."""


@dataclass(frozen=True)
class Structure:
    """The structure that a request wants its answer to have."""

    field: str
    """The client's name of the field."""
    params: Mapping[str, Any]
    """The fields of StructuredOutputs."""

    def parsed(self) -> StructuredOutputs:
        return StructuredOutputs(**self.params)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    messages: Sequence[dict[str, Any]]
    """As chat templates expect them: text is one string, arguments are objects."""
    sampling: Mapping[str, Any]
    """The fields of SamplingParams that the request sets."""
    tools: ToolUse = field(default_factory=ToolUse)
    template: TemplateOptions = field(default_factory=TemplateOptions)
    structure: Structure | None = None
    bad_words: Sequence[str] = ()
    scores_all: bool = False
    """Whether tokens that end an answer have log probabilities too, although they are not text."""
    n: int = 1
    names: Mapping[str, str] = field(default_factory=dict)
    """The client's names of SamplingParams fields, and of `messages` and `tools`, if they differ.
    """

    def name_of(self, name: str) -> str:
        return self.names.get(name, name)
