"""Tests of the Triton kernels without a GPU.

They run tests/kernels/triton through Triton's interpreter, which must be selected before triton is
imported, and test properties that only the compiler shows.
"""

import importlib
import os
import pkgutil
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent / "triton"
GROUPS = (
    ("linear", "latent", "recurrent", "float8_kv"),
    ("verify", "decode", "prefill", "far_pages", "fixed", "sample"),
    ("quantized", "fragments", "model", "speculation", "experts", "kernels", "trees", "tune"),
)
"""Tests that share a process, because starting one takes seconds; all groups take equally long."""
KINDS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32",
    torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32",
}  # fmt: skip


@pytest.mark.parametrize("names", GROUPS, ids="-".join)
def test_through_the_interpreter(names):
    pytest.importorskip("triton", reason="triton has no wheel for this platform")
    files = [f"{FOLDER}/test_{name}.py" for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rp", *files],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        cwd=FOLDER.parents[2],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = set(re.findall(r"^PASSED \S+/test_(\w+)\.py::", done.stdout, re.MULTILINE))
    assert passed == set(names), done.stdout


def test_every_file_is_in_one_group():
    names = [file.stem.removeprefix("test_") for file in FOLDER.glob("test_*.py")]
    assert sorted(name for group in GROUPS for name in group) == sorted(names)


def test_globals_of_kernels_equal_themselves():
    """Triton compares them at every launch with what was compiled, and refuses one that differs:
    NaN does, from itself."""
    jit = pytest.importorskip("triton.runtime.jit", reason="triton has no wheel for this platform")
    import slotzero.kernels.triton as package

    modules = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    named = [vars(importlib.import_module(module.name)) for module in modules]
    kernels = {one for names in named for one in names.values() if isinstance(one, jit.JITFunction)}
    assert kernels
    for kernel in kernels:
        assert kernel.cache_key  # finds them
        for (name, _), (value, names) in kernel.used_global_vals.items():
            assert names[name] == value, f"{kernel.__name__}: {name}"


@pytest.mark.parametrize("pairs", [16, 128])
def test_rows_of_latent_heads_are_prefetched(monkeypatch, pairs):
    """The test compiles for an H200, which needs no GPU. If the compiler no longer copied rows
    ahead of their use, results would not show it."""
    triton = pytest.importorskip("triton", reason="triton has no wheel for this platform")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from slotzero.kernels.triton.attention import mla

    monkeypatch.setattr(mla, "shared_memory", lambda: 227 << 10)
    kernel, tile = mla._attend_kernel, mla.tile_for(pairs, 576, 2)
    constants = {
        "HEADS": pairs, "ROPE_DIM": 64, "LATENT": 512, "PAGE": 16, "PAIRS": tile.pairs,
        "KEYS": tile.keys, "ROPE_BLOCK": 64, "WIDTH": 512, "RUN": 16, "AHEAD": tile.ahead,
        "PDL": True,
    }  # fmt: skip
    constants |= dict.fromkeys(("firsts", "sizes", "bases", "bits_seen", "sums"))
    kinds = dict.fromkeys(("query", "kv_pages", "out"), "*bf16")
    kinds |= dict.fromkeys(("partial", "peak_of", "total_of"), "*fp32")
    kinds |= dict.fromkeys(("table_stride", "span", "parts"), "i32") | {"scale": "fp32"}
    kinds |= dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "*i32") for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    given = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        ASTSource(kernel, signature, given, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": tile.warps, "launch_pdl": True},
    )
    assert compiled.asm["ttgir"].count("async_copy_global_to_local") >= 3
    assert compiled.metadata.shared <= tile.num_bytes(576, 2)


@pytest.mark.parametrize("name", ["float8", "scattered"])
def test_decoded_weights_stay_in_registers(monkeypatch, name):
    """Compile products with quantised weights for an H200. Its matrix units take codes in float8,
    or what is decoded from other codes, from registers; memory is read steps ahead."""
    pytest.importorskip("triton", reason="triton has no wheel for this platform")
    from slotzero.kernels.triton.linear import linear_quantized, round_float8, tiles_quantized
    from slotzero.kernels.types import Normed
    from slotzero.kernels.weights import QuantizedWeight, WeightFormat

    compiled = []
    for module in (linear_quantized, round_float8):
        compile_instead(monkeypatch, module, compiled)
    monkeypatch.setattr(tiles_quantized, "shared_memory", lambda: 227 << 10)
    monkeypatch.setattr(tiles_quantized, "num_processors", lambda: 132)
    monkeypatch.setattr(linear_quantized, "_is_unpacked", lambda *_: False)
    format = {
        "float8": WeightFormat("float8", 128, activations="float8_group"),
        "scattered": WeightFormat("uint4", 128, 8, has_offsets=True, is_scattered=True, groups=32),
    }[name]
    tensors = {
        field: torch.empty(shape, dtype=dtype)
        for field, (shape, dtype) in format.shapes(4096, 4096).items()
    }
    weight = QuantizedWeight(
        **tensors, bias=None, out_features=4096, in_features=4096, dtype=torch.bfloat16,
        format=format,
    )  # fmt: skip
    for rows in (16, 200):
        x = torch.empty(rows, 4096, dtype=torch.bfloat16)
        linear_quantized.product(Normed(x), weight, torch.empty_like(x))
    products = [one for one in compiled if "warp_group_dot" in one.asm["ttgir"]]
    assert len(products) == 2
    for one in products:
        text = one.asm["ttgir"]
        assert re.search(r"warp_group_dot .* : tensor<[^*]*dot_op[^*]* \* !ttg.memdesc", text)
        assert text.count("async_copy_global_to_local") >= 2 * 3
        assert one.metadata.shared <= 227 << 10


FRAGMENTS = {
    "uint4": ("uint4", 128, 8, torch.bfloat16),
    "uint8": ("uint8", 128, 128, torch.float16),
    "mxfp4": ("mxfp4", 32, 0, torch.uint8),
}


@pytest.mark.parametrize("name", FRAGMENTS)
def test_fragments_stay_in_registers(monkeypatch, name):
    """Compile products with weights in fragments for an H200. With a slice for each warp, the loop
    has no value pass between lanes; else matrix units take the weight from registers."""
    pytest.importorskip("triton", reason="triton has no wheel for this platform")
    from slotzero.kernels.triton.linear import fragments, linear_fragments, tiles_fragments
    from slotzero.kernels.types import Normed
    from slotzero.kernels.weights import QuantizedWeight, WeightFormat

    compiled = []
    compile_instead(monkeypatch, linear_fragments, compiled)
    monkeypatch.setattr(tiles_fragments, "num_processors", lambda: 132)
    monkeypatch.setattr(linear_fragments, "arrivals", lambda: torch.empty(1, dtype=torch.int32))
    codes, group, zero, scale_dtype = FRAGMENTS[name]
    format = WeightFormat(codes, group, zero, scale_dtype=scale_dtype)
    tensors = {
        field: torch.empty(shape, dtype=dtype)
        for field, (shape, dtype) in fragments.shapes(4096, 8192, format).items()
    }
    weight = QuantizedWeight(
        **tensors, bias=None, out_features=4096, in_features=8192, dtype=torch.bfloat16,
        format=format,
    )  # fmt: skip
    for rows in (1, 16, 64):
        x = torch.empty(rows, 8192, dtype=torch.bfloat16)
        linear_fragments.product(Normed(x), weight, torch.empty_like(x)[:, :4096])
    *few, many = compiled
    for one in few:
        loops = re.findall(r"(\$L__BB\w+):(.*?)bra\b[^;]*\1;", one.asm["ptx"], re.DOTALL)
        (loop,) = (text for _, text in loops if "mma.sync" in text)
        assert not re.findall(r"shared|bar\.sync|shfl", loop)
        assert re.search(r"ld\.global\.cg\S*\.v4\.b32", loop)
    text = many.asm["ttgir"]
    assert re.search(r"warp_group_dot .* : tensor<[^*]*dot_op[^*]* \* !ttg.memdesc", text)
    assert "async_copy_global_to_local" in text


def test_all_tiles_of_one_order_take_the_same_matrix_instructions(monkeypatch):
    """Compile products and attention of deterministic mode for an H200. mma.sync, which the
    compiler would choose for few rows, may sum in another order than wgmma."""
    pytest.importorskip("triton", reason="triton has no wheel for this platform")
    from slotzero.kernels.triton.attention import fixed, fixed_plan, prefill
    from slotzero.kernels.triton.linear import linear_fixed, tiles_fixed
    from slotzero.kernels.triton.linear.operands import Operands
    from slotzero.kernels.types import Heads, PagedKv, Rows, Tokens

    compiled, ints = [], partial(torch.zeros, dtype=torch.int32)
    for module in (linear_fixed, fixed, fixed_plan, prefill):
        compile_instead(monkeypatch, module, compiled)
    monkeypatch.setattr(tiles_fixed, "num_processors", lambda: 132)
    monkeypatch.setattr(fixed, "shared_memory", lambda: 227 << 10)
    monkeypatch.setattr(linear_fixed.linear_tma, "arrivals", lambda: ints(1))
    for rows, features, kind in ((1, 1024, None), (64, 2048, "silu"), (300, 1024, None)):
        weight = torch.empty(features, 1024, dtype=torch.bfloat16)
        given = Operands(torch.empty(rows, 1024, dtype=torch.bfloat16), weight, None)
        shares = tiles_fixed.shares_of(features, 1024) if kind is None else 1
        tile = tiles_fixed.fixed_tiles_for(rows, torch.bfloat16, shares)[0]
        out = given.x.new_empty(rows, features if kind is None else features // 2)
        linear_fixed.product(given, out, tile, activation=kind)
    heads = Heads(32, 8, 128, 128, 1e-6, 0.1)
    kv = PagedKv(torch.empty(4, 16, 8, 256, dtype=torch.bfloat16), ints(9, 64))
    for num, rows in ((8, None), (2048, Rows(*(ints(8) for _ in range(4))))):
        plan = fixed_plan.plan(Tokens(ints(num), ints(num)), rows, heads)
        fixed.attend(torch.empty(num, 32, 128, dtype=torch.bfloat16), None, kv, plan, heads)
    products = [one for one in compiled if "wgmma" in one.asm["ptx"]]
    assert len(products) == 5
    assert not any("mma.sync" in one.asm["ptx"] for one in compiled)
    assert not any("fma.rn.f32" in one.asm["ptx"] for one in products[:3])  # none is contracted
    assert "m64n8k16" in products[3].asm["ptx"]  # few pairs are the second operand


PAGED = ("decode", "decode_stream_k", "verify", "prefill", "mla", "mla_plan", "mla_prefill",
         "mla_rows", "per_head")  # fmt: skip


TREES = "slotzero.kernels.triton.speculation.trees"
COMPILED = {
    "heads": {"_decode_kernel", "_stream_k_kernel", "_verify_kernel", "_rope_store_kernel",
              "_attend_kernel", "_move_kv_kernel"},
    "latent": {"_store_kernel", "_attend_kernel", "_move_kv_kernel"},
}  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
def test_kernels_over_fp8_pages_have_one_type_for_each_variable(monkeypatch, name):
    """The interpreter accepts what the compiler's front end refuses."""
    pytest.importorskip("triton", reason="triton has no wheel for this platform")
    from slotzero.kernels.triton.kernels import TritonKernels
    from slotzero.kernels.types import (
        Angles,
        Heads,
        MlaShape,
        MlaWeights,
        PagedKv,
        QkNorms,
        Rows,
        Tokens,
    )

    compiled, kernels = [], TritonKernels()
    translate_only(monkeypatch)
    for file in PAGED:
        module = importlib.import_module(f"slotzero.kernels.triton.attention.{file}")
        compile_instead(monkeypatch, module, compiled, only="kv_pages")
        monkeypatch.setattr(module, "shared_memory", lambda: 227 << 10, raising=False)
        monkeypatch.setattr(module, "num_processors", lambda: 132, raising=False)
    compile_instead(monkeypatch, importlib.import_module(TREES), compiled, only="kv_pages")

    def ints(*shape):
        return torch.zeros(*shape, dtype=torch.int32)

    def numbers(*shape):
        return torch.empty(*shape, dtype=torch.bfloat16)

    mla = MlaShape(nope_dim=16, rope_dim=16, v_head_dim=16) if name == "latent" else None
    heads = Heads(4, 1, 32, 16, 1e-6, 1.0, mla=mla) if mla else Heads(4, 2, 32, 32, 1e-6, 1.0)
    pages = torch.empty(2, 4, 16, heads.num_kv_heads, heads.row_size, dtype=torch.uint8)
    stacked = PagedKv(pages, ints(65, 4), torch.ones(2, 2))
    weights = MlaWeights(numbers(16), numbers(4, 16, 16), numbers(4, 16, 16))
    rows = [Rows(*(ints(4) for _ in range(4)), span=span) for span in (2, 0)]
    for num, its_rows in ((8, None), (32, None), (8, rows[0]), (32, rows[1])):
        tokens, angles = Tokens(ints(num), ints(num)), Angles(*torch.empty(2, num, 1, 16))
        plan, kv = kernels.plan(tokens, its_rows, heads), stacked.of_layer(1)
        if mla is not None:
            q, k = numbers(num, 4 * 32), numbers(num, 32)
            kernels.mla_attention(q, k, weights, angles, kv, plan, heads)
        else:
            norms = QkNorms(numbers(32), numbers(32))
            kernels.attention(numbers(num, sum(heads.sizes)), norms, None, angles, kv, plan, heads)
    kernels.move_kv(ints(4), ints(65), ints(4), ints(4, 8), stacked)
    assert {one.name for one in compiled} == COMPILED[name]


def translate_only(monkeypatch):
    """End compilation after the front end: the rest takes seconds for each kernel."""
    import triton
    from triton.backends.nvidia.compiler import CUDABackend

    compile, ended = triton.compile, RuntimeError("the front end is done")

    def end(*_):
        raise ended

    def translate(source, **kwargs):
        with pytest.raises(RuntimeError, match=str(ended)):
            compile(source, **kwargs)
        return SimpleNamespace(name=source.fn.__name__)

    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    monkeypatch.setattr(CUDABackend, "make_ttgir", end)
    monkeypatch.setattr(triton, "compile", translate)


def compile_instead(monkeypatch, module, compiled, only=None):
    """Let the launches of a module compile for an H200, which needs no GPU, and not run; `only`
    those of kernels with this argument, and each kernel once."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.tools.tensor_descriptor import TensorDescriptor

    def compile_only(kernel, grid, *args, **kwargs):
        names = kernel.arg_names
        if only and (only not in names or kernel.__name__ in [one.name for one in compiled]):
            return
        given = dict(zip(names, args, strict=False)) | kwargs
        options = {key: given.pop(key) for key in list(given) if key not in names}
        signature, constants, aligned = {}, {}, {}
        for i, name in enumerate(names):
            value = given[name]
            if isinstance(value, torch.Tensor):
                signature[name] = KINDS[value.dtype]
                aligned[(i,)] = [["tt.divisibility", 16]]
            elif isinstance(value, TensorDescriptor):
                kind = KINDS[value.base.dtype].removeprefix("*")
                signature[name] = f"tensordesc<{kind}{list(value.block_shape)}>"
            elif name in kwargs or value is None:
                signature[name], constants[(i,)] = "constexpr", value
            else:
                signature[name] = "i32" if isinstance(value, int) else "fp32"
                if value % 16 == 0 and name not in kernel.do_not_specialize:
                    aligned[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(kernel, signature, constants, aligned)
        compiled.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options))

    monkeypatch.setattr(module, "launch", compile_only)
    overlap = {"PDL": True, "launch_pdl": True}
    monkeypatch.setattr(module, "overlap", lambda: overlap, raising=False)
