"""Score templates: Jinja programs that render a query and a document as one prompt.

A reranker that answers in words was trained on one such form. This module does not know tokens or
scores.

The rule: a template has the variables `query` and `document`, those that the caller adds (such as
`instruction`), and the same two texts as `messages` with the roles query and document, which is
what templates for vLLM read.
"""

from collections.abc import Mapping
from typing import Any

from slotzero.errors import RequestError
from slotzero.text.chat_template import read_template, render_chat, reserved_variable

QWEN3_RERANKER = """\
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ instruction or \
"Given a web search query, retrieve relevant passages that answer the query" }}
<Query>: {{ query }}
<Document>: {{ document }}<|im_end|>
<|im_start|>assistant
<think>

</think>


"""  # the last line end is not rendered
_OWN = ("query", "document")


class ScoreTemplate:
    def __init__(self, given: str | None = None) -> None:
        """`given`: a path or the text; None: that of Qwen3-Reranker."""
        self._text = QWEN3_RERANKER if given is None else read_template(given, "score_template")

    def render(self, query: str, document: str, variables: Mapping[str, Any]) -> str:
        texts = dict(zip(_OWN, (query, document), strict=True))
        messages = [{"role": role, "content": text} for role, text in texts.items()]
        return render_chat(self._text, {**variables, **texts, "messages": messages})


def template_variables(
    instruction: str | None, variables: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the variables that a caller adds; `variables` come before `instruction`."""
    made = dict(variables or {})
    reserved = reserved_variable(made) or next((name for name in _OWN if name in made), None)
    if reserved is not None:
        raise RequestError(
            f"chat_template_kwargs: {reserved!r} is set by the engine", "chat_template_kwargs"
        )
    if instruction is not None:
        made.setdefault("instruction", instruction)
    return made
