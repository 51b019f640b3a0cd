"""Which format of tool calls and of reasoning the served model has, decided once at start-up.

It knows the settings and the chat template, not single requests. The rule: a format is never
guessed where the template says nothing; where it shows no tools at all, Slotzero's own prompt can.
"""

from dataclasses import dataclass

from slotzero.formats.reasoning import REASONING_NAMES, ReasoningFormat, reasoning_format_of
from slotzero.formats.tool_format import ToolFormat
from slotzero.formats.tool_formats import HERMES, TOOL_FORMAT_NAMES, tool_format_of


@dataclass(frozen=True)
class ToolSupport:
    form: ToolFormat | None
    refusal: str = ""
    """Why requests with tools are refused, if there is no format."""
    is_builtin: bool = False
    """Whether Slotzero's own prompt shows the tools, since the template does not."""


def tool_support(setting: str, template: str | None) -> ToolSupport:
    """Return the format of this model's tool calls, according to its template."""
    if setting == "none":
        return ToolSupport(None, "disabled on this server (--tool-call-parser none)")
    if template is None:
        return ToolSupport(None, "this model has no chat template; give one with --chat-template")
    given = None if setting == "auto" else TOOL_FORMAT_NAMES[setting]
    if "tools" not in template:
        return ToolSupport(given or HERMES, is_builtin=True)
    form = given or tool_format_of(template)
    if form is None:
        return ToolSupport(
            None,
            "the format of tool calls cannot be derived from this model's chat template; serve it "
            "with --tool-call-parser hermes, or another format that the model was trained with",
        )
    return ToolSupport(form)


def reasoning_of(setting: str, template: str | None) -> ReasoningFormat | None:
    """Return the format of this model's reasoning, according to its template."""
    if setting == "none" or template is None:
        return None
    return reasoning_format_of(template) if setting == "auto" else REASONING_NAMES[setting]
