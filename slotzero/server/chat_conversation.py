"""From a request for chat completions to a conversation.

This module knows chat's request model, not the model that answers.
"""

from typing import Any

from slotzero.errors import RequestError
from slotzero.server.conversation import Conversation, TemplateOptions
from slotzero.server.generation_requests import sampling_of, structure_of
from slotzero.server.protocol import ChatRequest, TokenizeRequest
from slotzero.server.tools import function_tools, template_messages, template_variables


def chat_conversation(body: ChatRequest, *, trusts_templates: bool) -> Conversation:
    """`trusts_templates`: whether a request may bring its own chat template."""
    if body.chat_template is not None and not trusts_templates:
        raise RequestError(
            "chat_template: not allowed on this server; it is started without "
            "--trust-request-chat-template",
            "chat_template",
        )
    given = sampling_of(body)
    limits = (body.max_completion_tokens, body.max_tokens)
    given["max_tokens"] = next((limit for limit in limits if limit is not None), None)
    names = {"effort": "reasoning_effort", "logprobs": "top_logprobs"}
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return Conversation(
        messages=template_messages(body.messages),
        sampling=given,
        tools=function_tools(body.tools, body.tool_choice, body.parallel_tool_calls),
        template=TemplateOptions(
            variables=_variables(body),
            effort=body.reasoning_effort,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template=body.chat_template,
            max_prompt_tokens=body.truncate_prompt_tokens,
        ),
        structure=structure_of(body),
        bad_words=body.bad_words or (),
        scores_all=bool(body.return_token_ids),
        n=body.n or 1,
        names=names,
    )


def shown_conversation(body: TokenizeRequest) -> Conversation:
    """Return a conversation of which only the prompt is wanted."""
    return Conversation(
        messages=template_messages(body.messages or []),
        sampling={},
        tools=function_tools(body.tools),
        template=TemplateOptions(
            variables=template_variables(body.chat_template_kwargs),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        ),
    )


def _variables(body: ChatRequest) -> dict[str, Any]:
    documents = {} if body.documents is None else {"documents": body.documents}
    return documents | template_variables(body.chat_template_kwargs)
