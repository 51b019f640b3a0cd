"""The formats of tool calls, and how a model's format follows from its chat template.

This module is data. A further format that fits ToolFormat is one more row here; tests, grammars and
--tool-call-parser find it by themselves.

The rule: a template's format is the first whose sign it contains, so rows with longer signs stand
before rows whose sign is a part of them.
"""

from collections.abc import Mapping
from dataclasses import replace

from slotzero.formats.tool_format import (
    JsonArguments,
    LiteralArguments,
    NamedCall,
    ObjectCall,
    Quote,
    TagArguments,
    ToolFormat,
)

HERMES = ToolFormat(
    name="hermes",
    aliases=("qwen2", "granite4", "longcat"),
    signs=("<tool_call>",),
    call=ObjectCall(),
    opening="<tool_call>\n",
    closing="\n</tool_call>",
    separator="\n",
    has_many=False,
)
QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    aliases=("qwen3_xml", "qwen3_5", "nemotron_v3", "step3p5"),
    signs=("<parameter=",),
    call=NamedCall(
        opening="<function=",
        after_name=">\n",
        closing="</function>\n",
        arguments=TagArguments("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    opening="<tool_call>\n",
    closing="</tool_call>",
    separator="\n",
    has_many=False,
)
SEED_OSS = replace(
    QWEN3_CODER,
    name="seed_oss",
    aliases=(),
    signs=("<seed:tool_call>",),
    opening="<seed:tool_call>\n",
    closing="</seed:tool_call>",
)
GLM45 = ToolFormat(
    name="glm45",
    aliases=("glm4_moe",),
    signs=("{function-name}\n<arg_key>", "<arg_key>{{ k }}</arg_key>\n"),
    call=NamedCall(
        opening="<tool_call>",
        after_name="\n",
        closing="</tool_call>",
        arguments=TagArguments("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    separator="\n",
)
GLM47 = replace(
    GLM45,
    name="glm47",
    aliases=(),
    signs=("<arg_key>",),
    call=NamedCall(
        opening="<tool_call>",
        after_name="",
        closing="</tool_call>",
        arguments=TagArguments("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
    ),
    separator="",
)
MINIMAX_M2 = ToolFormat(
    name="minimax_m2",
    aliases=(),
    signs=("<minimax:tool_call>",),
    call=NamedCall(
        opening='<invoke name="',
        after_name='">\n',
        closing="</invoke>\n",
        arguments=TagArguments('<parameter name="', '">', "</parameter>\n"),
    ),
    opening="<minimax:tool_call>\n",
    closing="</minimax:tool_call>",
)
DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    aliases=("deepseek_r1",),
    signs=("['type'] + '<｜tool▁sep｜>", "function<｜tool▁sep｜>"),
    call=NamedCall(
        opening="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        after_name="\n```json\n",
        closing="\n```<｜tool▁call▁end｜>",
        arguments=JsonArguments(),
    ),
    opening="<｜tool▁calls▁begin｜>",
    closing="<｜tool▁calls▁end｜>",
    separator="\n",
)
DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v31",
    aliases=(),
    signs=("<｜tool▁call▁begin｜>",),
    call=NamedCall(
        opening="<｜tool▁call▁begin｜>",
        after_name="<｜tool▁sep｜>",
        closing="<｜tool▁call▁end｜>",
        arguments=JsonArguments(),
    ),
    opening="<｜tool▁calls▁begin｜>",
    closing="<｜tool▁calls▁end｜>",
)
KIMI_K2 = ToolFormat(
    name="kimi_k2",
    aliases=(),
    signs=("<|tool_call_argument_begin|>",),
    call=NamedCall(
        opening="<|tool_call_begin|>",
        after_name="<|tool_call_argument_begin|>",
        closing="<|tool_call_end|>",
        arguments=JsonArguments(),
        name_prefix="functions.",
        name_suffix=":{index}",  # both are the call's id, which the template writes again
    ),
    opening="<|tool_calls_section_begin|>",
    closing="<|tool_calls_section_end|>",
)
MISTRAL = ToolFormat(
    name="mistral",
    aliases=(),
    signs=("[ARGS]",),
    id_len=9,
    call=NamedCall(
        opening="[TOOL_CALLS]",
        after_name="[ARGS]",
        closing="",
        arguments=JsonArguments(),
        id_marker="[CALL_ID]",
    ),
)
MISTRAL_LIST = ToolFormat(
    name="mistral_list",
    aliases=(),
    signs=("[TOOL_CALLS]",),
    id_len=9,
    call=ObjectCall(),
    opening="[TOOL_CALLS]",
    separator=", ",
    is_list=True,
)
GRANITE = ToolFormat(
    name="granite",
    aliases=(),
    signs=("<|tool_call|>",),
    call=ObjectCall(),
    opening="<|tool_call|>",
    separator=", ",
    is_list=True,
)
PHI4 = replace(
    GRANITE,
    name="phi4",
    aliases=("phi4_mini_json",),
    signs=("<|/tool_call|>", "<|/tool|>"),
    closing="<|/tool_call|>",
)
NEMOTRON = ToolFormat(
    name="nemotron",
    aliases=("nemotron_json",),
    signs=("<TOOLCALL>",),
    call=ObjectCall(),
    opening="<TOOLCALL>",
    closing="</TOOLCALL>",
    separator=", ",
    is_list=True,
)
_PYTHON = LiteralArguments(
    opening="(",
    closing=")",
    separator="=",
    quotes=(
        Quote("'", has_escapes=True),
        Quote('"""', has_escapes=True),
        Quote('"', has_escapes=True),
    ),
    is_python=True,
)
LFM2 = ToolFormat(
    name="lfm2",
    aliases=(),
    signs=("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ["),
    call=NamedCall(opening="", after_name="", closing="", arguments=_PYTHON),
    opening="<|tool_call_start|>",
    closing="<|tool_call_end|>",
    separator=", ",
    is_list=True,
)
PYTHONIC = replace(
    LFM2,
    name="pythonic",
    aliases=("llama4_pythonic", "olmo3"),
    signs=("<|python_start|>", "[func_name1("),
    opening="<|python_start|>",
    closing="<|python_end|>",
    is_bare=True,
)
GEMMA4 = ToolFormat(
    name="gemma4",
    aliases=(),
    signs=("<|tool_call>call:",),
    call=NamedCall(
        opening="<|tool_call>call:",
        after_name="",
        closing="<tool_call|>",
        arguments=LiteralArguments(
            opening="{",
            closing="}",
            separator=":",
            quotes=(Quote('<|"|>', has_escapes=False), Quote('"', has_escapes=True)),
            is_python=False,
        ),
    ),
)
FUNCTION_GEMMA = ToolFormat(
    name="functiongemma",
    aliases=(),
    signs=("<start_function_call>",),
    call=NamedCall(
        opening="<start_function_call>call:",
        after_name="",
        closing="<end_function_call>",
        arguments=LiteralArguments(
            opening="{",
            closing="}",
            separator=":",
            quotes=(Quote("<escape>", has_escapes=False), Quote('"', has_escapes=True)),
            is_python=False,
        ),
    ),
)
LLAMA = ToolFormat(
    name="llama",
    aliases=("llama3_json", "llama4_json"),
    signs=("<|python_tag|>", '"parameters": dictionary'),
    call=ObjectCall("parameters"),
    opening="<|python_tag|>",
    separator="; ",
    is_bare=True,
)
HARMONY = ToolFormat(  # channels.py parses it, since its headers vary
    name="harmony",
    aliases=("openai",),
    signs=("<|channel|>",),
    call=NamedCall(
        opening="<|channel|>commentary to=functions.",
        after_name=" <|constrain|>json<|message|>",
        closing="",
        arguments=JsonArguments(),
    ),
    separator="<|call|><|start|>assistant",
)

TOOL_FORMATS = (
    HARMONY,
    MINIMAX_M2,
    SEED_OSS,
    QWEN3_CODER,
    GLM45,
    GLM47,
    KIMI_K2,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GEMMA4,
    FUNCTION_GEMMA,
    LFM2,
    PYTHONIC,
    PHI4,
    GRANITE,
    MISTRAL,
    MISTRAL_LIST,
    NEMOTRON,
    HERMES,
    LLAMA,
)
TOOL_FORMAT_NAMES: Mapping[str, ToolFormat] = {
    name: form for form in TOOL_FORMATS for name in (form.name, *form.aliases)
}
"""Formats by all names that --tool-call-parser accepts."""


_FOREIGN_SIGNS = ("<function=", "<tool_calls>[", "]<]minimax[>[")
"""Signs of formats that are none of these, in templates that have the sign of one too."""


def tool_format_of(template: str) -> ToolFormat | None:
    """Return the format that this template writes, or None if it is none of these."""
    form = next((form for form in TOOL_FORMATS if any(s in template for s in form.signs)), None)
    is_foreign = any(sign in template for sign in _FOREIGN_SIGNS)
    return None if form in (HERMES, LLAMA) and is_foreign else form
