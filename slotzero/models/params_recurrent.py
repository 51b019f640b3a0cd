"""The weights of recurrent mixers, see params.py: as checkpoints join them, and as we do."""

from dataclasses import replace

from slotzero.kernels.types_recurrent import Scan
from slotzero.models.param import LayerParams, Param, Source, abreast
from slotzero.models.recurrent import Recurrent


def recurrent_params(hidden: int, of: Recurrent) -> list[Param]:
    params, scan, at = LayerParams(of.layers), of.scan, of.name
    inner, heads, parts = scan.inner_size, scan.num_heads, scan.sizes
    conv = abreast(f"{at}.conv1d", parts)
    if scan.kind == "delta":
        params.matrix("in_proj", hidden, *_delta_sources(at, scan))
    else:
        joined = abreast(f"{at}.in_proj", (inner, *parts, heads))
        joined = [replace(s, scale=x) for s, x in zip(joined, of.in_scales, strict=True)]
        params.matrix("in_proj", hidden, *(replace(s, scale=s.scale * of.in_scale) for s in joined))
        if of.in_bias:
            params.bias("in_bias", *joined)
        params.add("d", (Source(f"{at}.D", heads),), is_wide=True)
    params.matrix("conv", scan.conv_width, *conv, is_packed=False, is_conv=True)
    if of.conv_bias:
        params.bias("conv_bias", *conv)
    params.add("a_log", (Source(f"{at}.A_log", heads),), is_wide=True)
    params.add("dt_bias", (Source(f"{at}.dt_bias", heads),), is_wide=True)
    if of.norm_size:
        size = of.norm_size if scan.kind == "delta" else inner
        params.norm("gate_norm", f"{at}.norm", size, 0.0)
    out = Source(f"{at}.out_proj", hidden, scale=of.out_scale)
    params.matrix("scan_out", inner, out)
    if of.out_bias:
        params.bias("scan_out_bias", out)
    return params.made


def _delta_sources(at: str, scan: Scan) -> list[Source]:
    """Gates, queries, keys and values of each key head take turns, and so do b and a."""
    keys, values = scan.state_size, scan.inner_size // scan.num_groups
    each, few = scan.num_heads // scan.num_groups, scan.num_groups
    turns = {"q": (0, keys), "k": (keys, keys), "v": (2 * keys, values)}
    turns["z"] = (2 * keys + values, values)

    def rows(first: int, num: int, turn: int) -> list[int]:
        return [group * turn + row for group in range(few) for row in range(first, first + num)]

    turn = 2 * (keys + values)
    joined = [Source(f"{at}.in_proj_qkvz", few * turn, rows(*turns[n], turn)) for n in "zqkv"]
    steps = [Source(f"{at}.in_proj_ba", 2 * few * each, rows(i, each, 2 * each)) for i in (each, 0)]
    return joined + steps
