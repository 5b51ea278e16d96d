"""The graph of a decoder, as data in a DecoderSpec describes it: the one graph that every target compiles.

The node patterns, which the lowerings match. `/` separates a node from its weight-like name; a node's output is
"<node>/out" unless said otherwise, and "<name>/out" is always the last value of the unit <name>. C is the compute type.

weights     initializer `<name>.weight` is [in, out] for matrices, [V, E] for `embed.weight`; what follows by the
            product's Scheme (builder/scheme.py), all scales FLOAT, or C where they were made here (--precision int8,
            int4); DequantizeLinear has output_dtype C where its scales are not:
            float              the initializer has the precision's float type; Cast `<name>.weight/cast` where not C
            int8, fp8, int4    INT8, FLOAT8E4M3FN, INT4 [in, out] and `<name>.weight.scale` -> DequantizeLinear
                               `<name>.weight/dq`; the scale is [] for the whole weight, [out] with axis=1 for a scale
                               an output, [in/group, out] with axis=0, block_size=group for groups
            zero points        int4 is then UINT4 and the third input `<name>.weight.zero` UINT4 [in/group, out]
            fp4                FLOAT4E2M1 [in, out]; its scale is DequantizeLinear `<name>.weight/scale_dq` of
                               `<name>.weight.scale` FLOAT8E4M3FN [in/16, out] by `<name>.weight.scale_2` FLOAT []
            fp8_grid           behind the dq of int4: QuantizeLinear `<name>.weight/grid_q` to FLOAT8E4M3FN by
                               `<name>.weight.grid` FLOAT [] -> DequantizeLinear `<name>.weight/grid_dq`
            biases `<name>.bias` are C, norm weights FLOAT with the offset (1 + w) already added
input       of a quantized product, <name> the first of those that share it, each step where the Scheme has it:
            Mul(x, `<name>.input.pre_scale` C [in]) `<name>/pre_scale` (in FLOAT, between Casts
            `<name>/pre_scale/to_f32` and `.../to_compute`, where C does not hold the factors), then either, static,
            QuantizeLinear `<name>/input_q` to INT8 or FLOAT8E4M3FN by `<name>.input.scale` FLOAT [] (zero point
            `<name>.input.zero`) -> DequantizeLinear `<name>/input_dq`; or, dynamic and fp4, plansmith::RoundInput
            `<name>/round`
linear      MatMul(x, weight) `<name>/matmul` [-> Add(y, bias) `<name>/bias`] = `<name>/out`;
            <name> is layers.N.{q,k,v,o,gate,up,down} or lm_head
norm        RMSNormalization(axis=-1) `<name>` = `<name>/out`; between Cast `<name>/to_f32` and Cast
            `<name>/to_compute` where C is not FLOAT; <name> is layers.N.{attn_norm,mlp_norm,post_attn_norm,
            post_mlp_norm} or final_norm; layers.N.{q_norm,k_norm} stand between two Reshapes `<name>/split`
            ([T, heads, D]) and `<name>/merge`
embed       Gather(embed.weight, input_ids) `embed/gather` [-> Cast `embed/cast`]
            [-> Mul by scalar `embed.scale`, node `embed/scale`]; an int8 table is INT8 [V, E] and
            `embed.weight.scale` C [V] -> DequantizeLinear(axis=0) `embed.weight/dq` -> Gather
rope        Unsqueeze [1, T, heads*D] -> RotaryEmbedding(x, rope.I.cos, rope.I.sin, positions) `layers.N.q_rope`
            (num_heads; rotary_embedding_dim where it is not D) -> Squeeze; caches are C [max_seq_len, rotary_dim/2];
            positions is position_ids as int64 [1, T], shared by all layers
attention   plansmith::PagedAttention `layers.N.attn` (contract.py); FP8 and INT8 pools come with the FLOAT [] scales
            `layers.N.k_scale` and `layers.N.v_scale`
mlp         silu: Sigmoid `layers.N.act/sigmoid`, Mul(gate, sigmoid) `layers.N.act/silu`; else Gelu
            `layers.N.act/gelu`; then Mul(act, up) `layers.N.glu`
residual    Add(x, branch) `layers.N.attn_add` and `layers.N.mlp_add`
logits      Gather(x, logits_rows) `select/gather` (before final_norm) -> final_norm -> MatMul `lm_head/matmul`
            with lm_head.weight like any matrix, or, tied, Transpose `lm_head.weight/transpose` of
            embed.weight [V, E] (int8: of the same `embed.weight/dq`; else behind Cast `embed.weight/cast` if any)
            [-> Cast to FLOAT] [-> Div, Tanh, Mul by scalar `logits.softcap`] = `logits`
            (an Identity `logits/identity` where nothing else would name it)

Every node has metadata_props["plansmith.block"]: embed, layers.N.attn, layers.N.mlp or logits.
"""

from __future__ import annotations

import onnx_ir as ir

from ...runtime.errors import CheckpointError, InvalidArgumentError
from ..checkpoint import WeightSource
from ..limits import Limits
from ..precision import Precision
from ..spec import DecoderSpec, weight_shapes
from . import contract
from .attention import StepInputs, attention
from .graph_builder import BLOCKS, ROWS, SEQS, TABLE, TOKENS, GraphBuilder
from .linear import embed, logits
from .mlp import mlp
from .norm import rms_norm
from .rope import Ropes
from .weights import WeightLoader

COMPUTE_TYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}

KV_TYPES = {"float16": ir.DataType.FLOAT16, "fp8": ir.DataType.FLOAT8E4M3FN, "int8": ir.DataType.INT8}


def build_graph(
    spec: DecoderSpec,
    weights: WeightSource,
    precision: Precision,
    limits: Limits,
    *,
    compute: str = "float32",
) -> ir.Model:
    """Return the graph of contract.py for one decoder; no weight is read.

    weights : asked for a weight each time an initializer's data is; must outlive the model
    compute : type of the activations, the residual stream and the pools that are not quantized: float32, float16
        or bfloat16
    raises : InvalidArgumentError for an unknown compute type, CheckpointError if a weight is missing or misshapen
    """
    if compute not in COMPUTE_TYPES:
        raise InvalidArgumentError(
            f"compute type {compute!r} is not known; choose one of {', '.join(COMPUTE_TYPES)}"
        )
    _check_weights(spec, weights)
    g = GraphBuilder(COMPUTE_TYPES[compute])
    w = WeightLoader(g, weights, precision)
    ids, positions, rows, step = _inputs(g, spec, limits, KV_TYPES.get(precision.kv, g.compute))
    ropes = Ropes(g, spec.ropes, limits.max_seq_len, positions)

    g.set_block("embed")
    x = embed(g, w, ids, spec)
    for layer in range(spec.num_layers):
        x = _layer(g, w, spec, ropes, step, x, layer)
    g.set_block("logits")
    x = g.node("Gather", [x, rows], "select/gather", g.compute, (ROWS, spec.hidden_size), {"axis": 0})
    x = rms_norm(g, w, x, "final_norm", spec.norm_eps, spec.norm_offset, ROWS)
    g.output(logits(g, w, x, spec))
    for layer in range(spec.num_layers):
        g.output(g.made(contract.k_pool_out(layer)))
        g.output(g.made(contract.v_pool_out(layer)))
    return g.finish(
        spec.family,
        {
            "plansmith.graph_version": str(contract.VERSION),
            "plansmith.precision": precision.name,
            "plansmith.compute": compute,
            "plansmith.max_seq_len": str(limits.max_seq_len),
        },
    )


def _layer(
    g: GraphBuilder,
    w: WeightLoader,
    spec: DecoderSpec,
    ropes: Ropes,
    step: StepInputs,
    x: ir.Value,
    layer: int,
) -> ir.Value:
    """One block: attention and the MLP, each normed before (and after, with post_norms) and added to x."""
    p = f"layers.{layer}."
    shape = (TOKENS, spec.hidden_size)
    eps, offset = spec.norm_eps, spec.norm_offset

    g.set_block(f"{p}attn")
    h = rms_norm(g, w, x, f"{p}attn_norm", eps, offset)
    h = attention(g, w, spec, ropes, step, h, layer)
    if spec.post_norms:
        h = rms_norm(g, w, h, f"{p}post_attn_norm", eps, offset)
    x = g.node("Add", [x, h], f"{p}attn_add", g.compute, shape)

    g.set_block(f"{p}mlp")
    h = rms_norm(g, w, x, f"{p}mlp_norm", eps, offset)
    h = mlp(g, w, spec, h, layer)
    if spec.post_norms:
        h = rms_norm(g, w, h, f"{p}post_mlp_norm", eps, offset)
    return g.node("Add", [x, h], f"{p}mlp_add", g.compute, shape)


def _inputs(
    g: GraphBuilder, spec: DecoderSpec, limits: Limits, kv: ir.DataType
) -> tuple[ir.Value, ir.Value, ir.Value, StepInputs]:
    """Add the contract's inputs, in its order."""
    i32 = ir.DataType.INT32
    ids = g.input(contract.INPUT_IDS, i32, (TOKENS,))
    positions = g.input(contract.POSITION_IDS, i32, (TOKENS,))
    g.input(contract.QUERY_LENS, i32, (SEQS,))
    kv_lens = g.input(contract.KV_LENS, i32, (SEQS,))
    cu = g.input(contract.CU_QUERY_LENS, i32, (f"{SEQS}_plus_1",))
    table = g.input(contract.BLOCK_TABLE, i32, (SEQS, TABLE))
    rows = g.input(contract.LOGITS_ROWS, i32, (ROWS,))
    dims = (BLOCKS, spec.num_kv_heads, limits.tokens_per_block, spec.head_dim)
    pools = [
        (g.input(contract.k_pool(n), kv, dims), g.input(contract.v_pool(n), kv, dims))
        for n in range(spec.num_layers)
    ]
    k_pools, v_pools = (tuple(side) for side in zip(*pools, strict=True))
    return ids, positions, rows, StepInputs(cu, kv_lens, table, k_pools, v_pools, limits.tokens_per_block)


def _check_weights(spec: DecoderSpec, weights: WeightSource) -> None:
    have = set(weights.names())
    for name, shape in weight_shapes(spec).items():
        if name not in have:
            raise CheckpointError(
                f"the checkpoint has no weight {name}, which a {spec.family} model needs; "
                "it is incomplete or of another architecture: get it again"
            )
        if tuple(weights.shape(name)) != shape:
            raise CheckpointError(
                f"weight {name} has shape {tuple(weights.shape(name))}, config.json asks for {shape}; "
                "the two do not belong together: get the checkpoint again"
            )
