"""The library transformers: imported when a model first needs it, with an error that names the
remedy if it is missing, and the model class that a config.json names."""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from slotzero.errors import ConfigError, UnsupportedModelError
from slotzero.models.bridge.attention import attend, mark_mask
from slotzero.models.bridge.experts import forward_in_slices
from slotzero.quantization.quantization import CHOICE

Config = Mapping[str, Any]  # config.json

IMPLEMENTATION = "slotzero"
"""Name of our attention in transformers' attention interface. There is no function for masks under
this name, so models make no mask."""
MASKED = "slotzero_masks"
"""The same attention, for a pass in which models make their masks."""
_OWN_FIELDS = (CHOICE, "quantization_config")


@cache
def transformers() -> Any:
    """Import transformers; raise if it is not installed."""
    try:
        library = importlib.import_module("transformers")
    except ImportError:
        raise UnsupportedModelError(
            "the bridge needs the package transformers: pip install 'slotzero[transformers]'"
        ) from None
    if not hasattr(library, "AttentionInterface"):
        raise UnsupportedModelError(
            f"the bridge needs a newer transformers than {library.__version__}: "
            "pip install --upgrade 'slotzero[transformers]'"
        )
    return library


def class_and_config(config: Config) -> tuple[Any, Any]:
    """Return the model class that a config.json names, and transformers' config for it, with our
    attention and experts chosen."""
    kind, made = _model_class(config), _library_config(config)
    library = transformers()
    for name in (IMPLEMENTATION, MASKED):
        library.AttentionInterface.register(name, attend)
    library.AttentionMaskInterface.register(MASKED, mark_mask)
    library.integrations.moe.ExpertsInterface.register(IMPLEMENTATION, forward_in_slices)
    made._attn_implementation = IMPLEMENTATION
    made.use_cache = False
    if kind._can_set_experts_implementation():
        made._experts_implementation = IMPLEMENTATION
    return kind, made


def _model_class(config: Config) -> Any:
    """Return transformers' class of causal language models for this config.json."""
    library, named = transformers(), (config.get("architectures") or [None])[0]
    if named is None:
        mapping = library.MODEL_FOR_CAUSAL_LM_MAPPING
        kind = type(_library_config(config))
        if kind not in mapping:
            raise UnsupportedModelError(
                f"config field model_type={config.get('model_type')!r}: transformers "
                f"{library.__version__} has no causal language model of this type"
            )
        return mapping[kind]
    found = getattr(library, str(named), None)
    if found is None:
        code = " (its code is part of the checkpoint, which is not run)"
        raise UnsupportedModelError(
            f"architecture {named!r} is neither a family of Slotzero nor a class of transformers "
            f"{library.__version__}{code if config.get('auto_map') else ''}"
        )
    if not str(named).endswith(("ForCausalLM", "LMHeadModel")):
        raise UnsupportedModelError(
            f"architecture {named!r} is not a causal language model: the bridge to transformers "
            "runs classes that end in ForCausalLM or LMHeadModel"
        )
    return found


def _library_config(config: Config) -> Any:
    library = transformers()
    _refuse_quantized(config)
    fields = {name: value for name, value in config.items() if name not in _OWN_FIELDS}
    kind = fields.pop("model_type", None)
    if kind not in library.CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"config field model_type={kind!r} is unknown to transformers {library.__version__}"
        )
    try:
        return library.CONFIG_MAPPING[kind].from_dict(fields)
    except Exception as error:  # its validation raises many types
        raise UnsupportedModelError(
            f"transformers refuses this config.json: {first_line(error)}"
        ) from error


@contextmanager
def attention_with_masks(made: Any) -> Iterator[None]:
    """Let models make masks while this context is open."""
    made._attn_implementation = MASKED
    try:
        yield
    finally:
        made._attn_implementation = IMPLEMENTATION


@contextmanager
def quiet() -> Iterator[None]:
    """Show neither progress bars of transformers nor its report on tensors, which are ours, nor
    warnings of slow code while a model is examined."""
    logging = transformers().utils.logging
    level, had_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bar:
            logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _refuse_quantized(config: Config) -> None:
    if config.get("quantization_config"):
        raise UnsupportedModelError(
            "config field quantization_config: the bridge to transformers loads unquantised "
            "checkpoints only; use the unquantised one"
        )
    if config.get(CHOICE, "auto") not in ("auto", "none"):
        raise ConfigError(
            f"quantization={config[CHOICE]}: the bridge to transformers keeps weights as they are "
            "stored; drop the setting"
        )
