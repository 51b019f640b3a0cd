"""Command-line flags made from dataclasses: each field is a flag, and its docstring is the help.

This module does not know what a setting does. Names are vLLM's; SGLang's names for the same
settings work too.

The rule: a namespace holds only the flags that were given, and the command's own defaults;
everything else is left to the dataclass, so that a default is written once.
"""

import argparse
import ast
import difflib
import functools
import inspect
import os
import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, NoReturn, get_args, get_origin

from slotzero.cli.drafters import drafter, speculative_config
from slotzero.config import (
    BACKENDS,
    DEFAULT_MODEL,
    DRAFTERS,
    DTYPES,
    EXECUTORS,
    GENERATION_CONFIGS,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    MODEL_IMPLS,
    POOLINGS,
    SANITIZE_ACTIONS,
    SANITIZE_MODES,
    SCHEDULING_POLICIES,
    EngineConfig,
)
from slotzero.errors import ConfigError
from slotzero.sampling.params import SamplingParams
from slotzero.server.settings import REASONING_PARSERS, TOOL_CALL_PARSERS, ServerSettings

ALIASES: Mapping[str, tuple[str, ...]] = {
    "max_model_len": ("--context-length",),
    "max_num_seqs": ("--max-running-requests",),
    "max_num_batched_tokens": ("--chunked-prefill-size",),
    "gpu_memory_utilization": ("--mem-fraction-static",),
    "page_size": ("--block-size",),
    "seed": ("--random-seed",),
    "tensor_parallel_size": ("--tp-size", "--tp", "-tp"),
    "data_parallel_size": ("--dp-size", "--dp", "-dp"),
    "executor": ("--distributed-executor-backend",),
    "speculative": ("--speculative-algorithm",),
    "speculative_model": ("--speculative-draft-model-path",),
    "speculative_steps": ("--speculative-num-steps", "--num-speculative-tokens"),
    "speculative_topk": ("--speculative-eagle-topk",),
}
SWITCHES: Mapping[str, tuple[str, bool]] = {
    "--disable-cuda-graph": ("enforce_eager", True),
    "--disable-radix-cache": ("enable_prefix_caching", False),
}
CHOICES = {
    "backend": BACKENDS,
    "dtype": DTYPES,
    "executor": EXECUTORS,
    "generation_config": GENERATION_CONFIGS,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "load_format": LOAD_FORMATS,
    "model_impl": MODEL_IMPLS,
    "pooling": POOLINGS,
    "sanitize": SANITIZE_MODES,
    "sanitize_action": SANITIZE_ACTIONS,
    "scheduling_policy": SCHEDULING_POLICIES,
    "speculative": DRAFTERS,
    "tool_call_parser": TOOL_CALL_PARSERS,
    "reasoning_parser": REASONING_PARSERS,
}
SIZES = ("kv_cache_memory", "sliding_kv_memory", "grammar_memory", "max_request_bytes")
ENGINE_FIELDS = tuple(
    field.name
    for field in fields(EngineConfig)
    # the positional argument, a setting of commands, and a flag of commands with chats
    if field.name not in ("model", "skip_tokenizer_init", "chat_template")
)
SERVER_FIELDS = tuple(field.name for field in fields(ServerSettings))
SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "min_tokens",
    "stop",
    "ignore_eos",
    "logprobs",
)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


_GIVEN = "_given"  # attribute of a namespace: the flags that were given, with their values


def _once(kind: Any) -> type[argparse.Action]:
    """Return an action for a flag with one value: a different second value, under any of its names,
    is refused, where argparse would keep the last."""

    class Once(kind):  # type: ignore[misc]
        def __call__(
            self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
        ) -> None:
            super().__call__(parser, namespace, values, option_string)
            if option_string is None:
                return  # a positional
            value = getattr(namespace, self.dest)
            shown = f"{option_string} {_as_typed(values)}".strip()
            given = vars(namespace).setdefault(_GIVEN, {})
            earlier, before = given.setdefault(self.dest, (value, shown))
            if earlier is not value and earlier != value:  # nan, given once, differs from itself
                parser.error(f"{before} and {shown}: two values for one setting; drop one")

    return Once


def _as_typed(values: Any) -> str:
    return " ".join(map(str, values)) if isinstance(values, list) else str(values)


class _Parser(argparse.ArgumentParser):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        for name in (None, "store", "store_const", "store_true"):
            self.register("action", name, _once(self._registry_get("action", name)))

    def error(self, message: str) -> NoReturn:
        """Exit with an error, and suggest a similar flag."""
        what, _, words = message.partition("unrecognized arguments: ")
        if not what and words.split():
            near = difflib.get_close_matches(words.split()[0], self._option_string_actions, 1)
            message += f"; did you mean {near[0]}?" if near else ""
        super().error(message)


def command_parser(name: str, usage: str, description: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"slotzero {name}",
        usage=f"slotzero {name} {usage}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--traceback", action="store_true", help="show a traceback if an error occurs"
    )
    return parser


def add_model(parser: argparse.ArgumentParser) -> None:
    what = f"{field_docs(EngineConfig).get('model', '')} (default: {DEFAULT_MODEL})"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=what)
    parser.add_argument("--model", "--model-path", dest="model_flag", metavar="MODEL", help=what)


def refuse_swallowed_model(args: argparse.Namespace) -> None:
    """Refuse a model that was read as a name: --served-model-name takes all words that follow, and
    if no MODEL is given elsewhere, the last of them may be meant as the model."""
    names = vars(args).get("served_model_name", ())
    is_given = args.model is not None or args.model_flag is not None
    if is_given or len(names) < 2 or not _is_like_a_model(names[-1]):
        return
    raise ConfigError(
        f"--served-model-name {' '.join(names)}: is {names[-1]!r} the model? Then give it first; "
        f"else name the model with --model {DEFAULT_MODEL}"
    )


def _is_like_a_model(word: str) -> bool:
    is_path = "/" in word or word.endswith(".gguf") or os.path.isdir(word)
    return is_path or word == DEFAULT_MODEL or word.startswith("tiny:")


def chosen_model(args: argparse.Namespace) -> str:
    if None not in (args.model, args.model_flag) and args.model != args.model_flag:
        raise ConfigError(f"two models, {args.model!r} and --model {args.model_flag!r}: drop one")
    chosen = args.model_flag if args.model is None else args.model
    return DEFAULT_MODEL if chosen is None else str(chosen)


def add_engine_flags(parser: argparse.ArgumentParser, **preferred: Any) -> None:
    """Add all engine flags. `preferred`: the command's own defaults in place of EngineConfig's."""
    group = parser.add_argument_group("engine")
    _add_fields(group, EngineConfig, ENGINE_FIELDS, preferred)
    for flag, (name, value) in SWITCHES.items():
        group.add_argument(
            flag,
            dest=name,
            action="store_const",
            const=value,
            default=argparse.SUPPRESS,
            help=f"Same as {_flag(name) if value else _flag('no_' + name)}.",
        )
    group.add_argument(
        "--speculative-config",
        type=speculative_config,
        default=argparse.SUPPRESS,
        metavar="JSON",
        help="--speculative, its model and its steps, as vLLM writes them: "
        '{"method": "eagle3", "model": "path", "num_speculative_tokens": 4}.',
    )
    parser.set_defaults(**preferred)


def add_chat_template(parser: argparse.ArgumentParser) -> None:
    _add_fields(parser.add_argument_group("chat"), EngineConfig, ("chat_template",), {})


def add_sampling_flags(
    parser: argparse.ArgumentParser, names: tuple[str, ...] = SAMPLING_FIELDS, **preferred: Any
) -> None:
    _add_fields(parser.add_argument_group("sampling"), SamplingParams, names, preferred)
    parser.set_defaults(**preferred)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    _add_fields(parser.add_argument_group("server"), ServerSettings, SERVER_FIELDS, {})


def server_settings(args: argparse.Namespace) -> ServerSettings:
    given = {name: value for name, value in vars(args).items() if name in SERVER_FIELDS}
    return ServerSettings(**given)


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings for EngineConfig and LLM, without the model."""
    names = (*ENGINE_FIELDS, "chat_template")
    given = {name: value for name, value in vars(args).items() if name in names}
    for name, value in vars(args).get("speculative_config", {}).items():
        if given.setdefault(name, value) != value:
            raise ConfigError(
                f"{_flag(name)} {given[name]} and {value} in --speculative-config: drop one"
            )
    return given


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters; --seed is the seed of the engine and of every request."""
    names = (*SAMPLING_FIELDS, "seed")
    return SamplingParams(**{name: value for name, value in vars(args).items() if name in names})


def fit_rows(settings: dict[str, Any], num_requests: int) -> dict[str, Any]:
    """Limit max_num_seqs to the number of requests unless it is given, as every size is
    recorded."""
    if "max_num_seqs" in settings:
        return settings
    from slotzero.executor.limits import choose_backend, default_max_num_seqs

    device, _ = choose_backend(EngineConfig(**settings))
    rows = min(num_requests, default_max_num_seqs(device))
    return settings | {"max_num_seqs": rows}


@functools.cache
def field_docs(owner: type) -> Mapping[str, str]:
    """Return the docstrings of fields. Python does not keep them, so they are read from the
    source."""
    try:
        body = ast.parse(inspect.getsource(owner)).body[0]
    except OSError:  # installed without sources: flags work without help texts
        return {}
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = " ".join(text.split())
    return docs


def size(text: str) -> int:
    """Return a size in bytes: '512M' -> 536870912"""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512M or 2G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _add_fields(
    group: argparse._ArgumentGroup,
    owner: type,
    names: tuple[str, ...],
    preferred: Mapping[str, Any],
) -> None:
    by_name = {field.name: field for field in fields(owner)}
    for name in names:
        field = by_name[name]
        doc = field_docs(owner).get(name, "")
        default = preferred.get(name, field.default)
        group.add_argument(
            _flag(name),
            *ALIASES.get(name, ()),
            dest=name,
            default=argparse.SUPPRESS,
            help=(doc + _show_default(default)).strip().replace("%", "%%"),
            **_how(field),
        )


def _how(field: Field[Any]) -> dict[str, Any]:
    """Return argparse's options for this field."""
    if field.type is bool:
        return {"action": _once(argparse.BooleanOptionalAction)}
    if field.name == "served_model_name":
        return {"action": "extend", "nargs": "+", "metavar": "NAME"}
    if field.name == "stop" or get_origin(field.type) is tuple:
        return {"action": "append", "metavar": "TEXT"}
    if field.name in CHOICES:
        convert = drafter if field.name == "speculative" else str.lower
        return {"choices": CHOICES[field.name], "type": convert}
    if field.name in ("chat_template", "score_template"):
        return {"metavar": "FILE_OR_TEXT"}
    if field.name in SIZES:
        return {"type": size, "metavar": "BYTES"}
    if field.type in (str, str | None):
        return {"metavar": "TEXT"}
    return {"type": _number_type(field.type), "metavar": "N"}


def _number_type(annotation: Any) -> Any:
    """int | None -> int"""
    if isinstance(annotation, types.UnionType):
        return next(kind for kind in get_args(annotation) if kind is not types.NoneType)
    return annotation


def _show_default(default: Any) -> str:
    if isinstance(default, bool):
        return f" (default: {'on' if default else 'off'})"
    if default in (None, MISSING, ()):
        return ""
    return f" (default: {default})"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
