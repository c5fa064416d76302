"""The decoder: one forward pass for training, prefill and decode.

Owns the stack of blocks, embedding and output head, the two layouts of the parameters, and the forward pass. Refuses to
own sharding rules (mesh.py), losses and the sampler's schedule.

Layers may differ in kind: with or without window, rotation, experts. Stacked layers are scanned in runs of repeating
periods, so that a kind is known at compile time and compile time still does not grow with depth.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from rljax.mesh import axis_size, constrain, row_axes
from rljax.models.arch import Arch, Rope
from rljax.models.attention import AttentionOptions, attend, attend_in_order, segment_mask, soft_cap
from rljax.models.block import INPUTS, Attention, Block, KeyValue, LayerKind, Tables, layer_kinds, rms_norm, rope_table, windows
from rljax.models.lora import detach
from rljax.models.moe import Routing
from rljax.models.parameters import constant, weight
from rljax.models.quantized import dequantised
from rljax.models.remat import REMAT, Remat
from rljax.models.sums import SUMS, gathered, passing
from rljax.pytree import Params

_LONGEST_PERIOD = 16
"""Layers that one pass of a scan holds at most; known models repeat after 1 to 6."""


class Forward(NamedTuple):
    """What a forward pass returns."""

    hidden: Float[Array, "b s d"]
    """Normalised final hidden states."""
    seen: KeyValue | tuple[Any, ...]
    """Keys and values: stacked, or one entry per layer in the separate layout."""
    routing: Routing | None
    """What the routers decided, stacked over the layers with experts; None unless it was asked for."""


class Decoder(nnx.Module):
    """Token ids to final hidden states.

    The blocks are stacked and scanned, so that compile time does not grow with depth; or, in the sampler's layout,
    separate, so that a decode step reads each weight where it lies instead of first copying it out of the stack, and with
    the output dims of each weight before its input dims, the order in which products with few rows are fastest.
    """

    def __init__(self, arch: Arch, rngs: nnx.Rngs, stacked: bool = True):
        self.arch = arch
        self.factors: dict[Any, Any] = nnx.data({})
        """Low-rank factors of an adapter, from `merge`: stacked by projection, or by layer and projection."""
        self.sums: dict[str, Any] = nnx.data({})
        """Sums that the gradients of stacked layers are added to, from `merge`; none where there is no such sum."""
        self.embed = weight(rngs, (arch.vocab_size, arch.embed_dim), ("vocab", "embed"))
        if stacked:
            self.layers: Block | nnx.List[Block] = Block(arch, rngs, arch.layers, stacked=True, outputs_first=False)
        else:
            self.layers = nnx.List([Block(arch, rngs, (layer,), stacked=False, outputs_first=True) for layer in arch.layers])
        self.final_norm = constant(0.0 if arch.norm_offset else 1.0, (arch.embed_dim,), ("embed",))
        if not arch.tie_embeddings:
            self.head = weight(rngs, (arch.vocab_size, arch.embed_dim), ("vocab", "embed"))

    @property
    def head_table(self) -> Float[Array, "v d"]:
        """The output head, one row per token; the embedding table itself when they are tied."""
        return (self.embed if self.arch.tie_embeddings else self.head)[...]

    def __call__(
        self,
        tokens: Int[Array, "b s"],
        positions: Int[Array, "b s"],
        segments: Int[Array, "b s"],
        *,
        parents: Int[Array, "b s"] | None = None,
        dtype: jnp.dtype,
        remat: Remat = "none",
        dropout: float = 0.0,
    ) -> tuple[Float[Array, "b s d"], KeyValue | tuple[Any, ...]]:
        """Return the normalised final hidden states, and per layer the keys and values; see `forward`."""
        out = self.forward(tokens, positions, segments, parents=parents, dtype=dtype, remat=remat, dropout=dropout)
        return out.hidden, out.seen

    def continued(
        self,
        tokens: Int[Array, "b s"],
        positions: Int[Array, "b s"],
        attention: Attention,
        cache: Sequence[Any],
        *,
        dtype: jnp.dtype,
        record_routing: bool = False,
    ) -> tuple[Float[Array, "b s d"], tuple[Any, ...], Routing | None]:
        """Return the final hidden states of tokens that continue what a cache holds, the cache with them, and their routing.

        For the separate layout. The cache has one entry per block, which `attention` reads and writes. The routing is
        None unless it is asked for.
        """
        tables = Tables(self._ropes(positions), attention, 0.0)
        embedded = self._embedded(tokens, dtype)
        hidden, seen, routing = self._one_by_one(embedded, tables, cache, None, dtype, record_routing)
        return self._normalised(hidden, dtype), seen, routing

    def forward(
        self,
        tokens: Int[Array, "b s"],
        positions: Int[Array, "b s"],
        segments: Int[Array, "b s"],
        *,
        parents: Int[Array, "b s"] | None = None,
        dtype: jnp.dtype,
        remat: Remat = "none",
        dropout: float = 0.0,
        choices: Int[Array, "l b s e"] | None = None,
        record_routing: bool = False,
        stored: Callable[[KeyValue], KeyValue] | None = None,
    ) -> Forward:
        """Run the decoder over whole sequences.

        A token sees the tokens of its own segment, and of the segment that `parents` names for it (a
        prompt that several continuations share), at its own or an earlier position and place in the row; segment 0 is
        padding, whose outputs are finite and mean nothing. A layer's window
        hides the positions before it. Products are made in `dtype` with float32 sums, everything between them in
        float32. `remat` is what the backward pass recomputes: nothing, all but the large products (`dots`, or `offload`),
        or every block (`full`). `dropout` is that of an adapter with random keys, see `lora.attach`.

        `record_routing` asks for what the routers decided; `choices`, recorded in another pass over the same tokens (one
        entry per layer with experts), sends the tokens to the same experts again; negative ones leave it to the router.
        `stored` gives keys and values the form in which a cache keeps them, and in which all tokens then see them.
        """
        arch = self.arch
        masks = {window: segment_mask(positions, segments, parents, window) for window in windows(arch)}
        # Over `context` each device has some queries of every row, and parts of a row would leave most of them idle.
        over_row = attend if axis_size("context") > 1 else attend_in_order

        def attention(
            query: Array, fresh: KeyValue, _: None, options: AttentionOptions, sinks: Array | None
        ) -> tuple[Array, KeyValue]:
            seen = fresh if stored is None else stored(fresh)
            return over_row(query, seen.key, seen.value, masks[options.window], options, sinks, seen.scales), seen

        tables, hidden = Tables(self._ropes(positions), attention, dropout), self._embedded(tokens, dtype)
        if isinstance(self.layers, Block):
            weights = {**nnx.to_pure_dict(nnx.split(self.layers)[1]), **self.factors}
            stack = _Stack(arch, weights, self.sums)
            hidden, seen, routing = _scan_runs(stack, hidden, tables, choices, dtype, remat, record_routing)
        else:
            nothing = [None] * arch.num_layers
            hidden, seen, routing = self._one_by_one(hidden, tables, nothing, choices, dtype, record_routing)
        return Forward(self._normalised(hidden, dtype), seen, routing)

    def _ropes(self, positions: Int[Array, "b s"]) -> dict[Rope, Float[Array, "b s r"]]:
        ropes = dict.fromkeys(kind.rope for kind in layer_kinds(self.arch) if kind.rope is not None)  # in the order of layers
        return {rope: rope_table(self.arch, rope, positions) for rope in ropes}

    def _embedded(self, tokens: Int[Array, "b s"], dtype: jnp.dtype) -> Float[Array, "b s d"]:
        hidden = _look_up(self.embed[...], tokens)
        if self.arch.embed_scale:
            # Rounded to the compute dtype, as the models were trained.
            hidden = hidden * jnp.sqrt(jnp.float32(self.arch.embed_dim)).astype(dtype).astype(jnp.float32)
        return constrain(hidden, row_axes(), "context")

    def _normalised(self, hidden: Float[Array, "b s d"], dtype: jnp.dtype) -> Float[Array, "b s d"]:
        arch = self.arch
        return rms_norm(hidden, self.final_norm[...], arch.norm_eps, arch.norm_offset).astype(dtype)

    def _one_by_one(
        self,
        hidden: Float[Array, "b s d"],
        tables: Tables,
        caches: Sequence[Any],
        choices: Int[Array, "l b s e"] | None,
        dtype: jnp.dtype,
        record: bool,
    ) -> tuple[Float[Array, "b s d"], tuple[Any, ...], Routing | None]:
        assert not isinstance(self.layers, Block), "a cache is for the separate layout"

        # Traced once per kind of layer rather than once per layer; XLA puts the layers back into one program.
        @partial(jax.jit, static_argnums=(0, 1))
        def block(definition: Any, kind: LayerKind, weights: Any, hidden: Array, *rest: Any) -> Any:
            return nnx.merge(definition, weights)(hidden, kind, tables, *rest, dtype)

        seen, routings, index = [], [], 0
        for number, (layer, kind, held) in enumerate(zip(self.layers, layer_kinds(self.arch), caches, strict=True)):
            replayed = choices[index] if kind.experts and choices is not None else None
            factors = self.factors.get(number, {})
            definition, weights = nnx.split(layer)
            hidden, layer_seen, routing = block(definition, kind, weights, hidden, held, replayed, factors)
            seen.append(layer_seen)
            if routing is not None:
                index += 1
                routings.append(routing)
        stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *routings) if record and routings else None
        return hidden, tuple(seen), stacked


class Run(NamedTuple):
    """Layers that repeat with a period."""

    first: int
    period: int
    repeats: int


@cache
def runs(kinds: tuple[Any, ...]) -> tuple[Run, ...]:
    """Split the layers into runs of repeating periods: from each start what reaches furthest, the shortest of equals."""
    found, first = [], 0
    while first < len(kinds):
        left = kinds[first:]
        reach = {}
        for period in range(1, min(_LONGEST_PERIOD, len(left)) + 1):
            repeats = 1
            while left[repeats * period : (repeats + 1) * period] == left[:period]:
                repeats += 1
            # A period that does not repeat is no run: its layers are taken one by one.
            if repeats > 1 or period == 1:
                reach[period] = repeats
        period = max(reach, key=lambda length: (length * reach[length], -length))
        found.append(Run(first, period, reach[period]))
        first += period * reach[period]
    return tuple(found)


class _Stack(NamedTuple):
    """The stacked layers of a model."""

    arch: Arch
    weights: Params
    sums: Params
    """Sums that their gradients are added to; empty without."""


def _scan_runs(
    stack: _Stack,
    hidden: Float[Array, "b s d"],
    tables: Tables,
    choices: Int[Array, "l b s e"] | None,
    dtype: jnp.dtype,
    remat: Remat,
    record: bool,
) -> tuple[Float[Array, "b s d"], KeyValue, Routing | None]:
    """Run the stacked layers: one scan per run of repeating layers."""
    seen, routings, sums = [], [], stack.sums
    for run in runs(layer_kinds(stack.arch)):
        given = stack._replace(sums=sums)
        (hidden, sums), run_seen, run_routing = _scan_run(given, run, hidden, tables, choices, dtype, remat, record)
        seen.append(run_seen)
        routings += [] if run_routing is None else [run_routing]
    if sums:
        hidden = gathered(hidden, sums, jax.lax.stop_gradient(stack.sums))
    return hidden, _joined(seen), _joined(routings) if routings else None


def _scan_run(
    stack: _Stack,
    run: Run,
    hidden: Float[Array, "b s d"],
    tables: Tables,
    choices: Int[Array, "l b s e"] | None,
    dtype: jnp.dtype,
    remat: Remat,
    record: bool,
) -> tuple[tuple[Float[Array, "b s d"], Params], KeyValue, Routing | None]:
    arch, weights = stack.arch, stack.weights
    kinds = layer_kinds(arch)[run.first : run.first + run.period]

    def block(offset: int, kind: LayerKind) -> Callable[..., Any]:
        def call(
            hidden: Array, sums: Params, layer: Params, replayed: Array | None, index: Array | None
        ) -> tuple[Array, Params, KeyValue, Routing | None]:
            if index is not None:  # in here, where `remat` has no second copy of the layer kept for the backward pass
                sums, layer = passing(sums, layer, _places(arch, run, offset, index, layer))
            own, factors = detach(layer)
            # A quantised base becomes arrays here, where `remat` has the backward pass do it again: one layer at a time.
            merged = nnx.merge(_block_graph(arch, kind.experts), dequantised(own, dtype))
            hidden, seen, routing = merged(hidden, kind, tables, None, replayed, factors, dtype)
            return constrain(hidden, row_axes(), "context"), sums, seen, routing if record else None

        return REMAT[remat](call)

    blocks = [block(offset, kind) for offset, kind in enumerate(kinds)]

    def period(carry: tuple[Array, Params], part: tuple[Params, Array | None, Array | None]) -> tuple[Any, Any]:
        (hidden, sums), (layers, choices, index), seen, routings = carry, part, [], []
        for offset, (kind, call) in enumerate(zip(kinds, blocks, strict=True)):
            layer, replayed = layers, choices
            if run.period > 1:
                layer = _layer(layers, kinds, offset)
                replayed = None if choices is None or not kind.experts else choices[_index(kinds, offset, "experts")]
            hidden, sums, layer_seen, routing = call(hidden, sums, layer, replayed, index)
            seen.append(layer_seen)
            routings += [] if routing is None else [routing]
        return (hidden, sums), (seen, routings)

    groups = {"experts" if kind.experts else "dense" for kind in kinds} | {"all"}
    present = {name: part for name, part in weights.items() if _GROUPS.get(name, "all") in groups}
    taken = _of_groups(present, lambda leaf, group: _periods(arch, run, leaf, group))
    replayed = None if choices is None or "experts" not in groups else _periods(arch, run, choices, "experts")
    index = jnp.arange(run.repeats) if stack.sums else None
    carry, (seen, routings) = jax.lax.scan(period, (hidden, stack.sums), (taken, replayed, index))
    return carry, _interleaved(seen), _interleaved(routings) if routings else None


# Parameters of a stack lie along its layers: all of them, or those with an MLP, or those with experts.
_GROUPS = {"gate_up": "dense", "down": "dense", "moe": "experts"}


def _of_groups(weights: Mapping[str, Any], pick: Callable[[Any, str], Any]) -> Params:
    """Apply `pick` to every leaf of a stack's parameters and the name of the group of layers it lies along."""
    groups = {name: _GROUPS.get(name, "all") for name in weights}
    return {name: jax.tree.map(lambda leaf, group=groups[name]: pick(leaf, group), part) for name, part in weights.items()}


def _index(kinds: Sequence[LayerKind], layer: int, group: str) -> int:
    """Return how many of the layers before this one belong to the group: its index along the group's leaves."""
    return layer if group == "all" else sum(kind.experts == (group == "experts") for kind in kinds[:layer])


def _periods(arch: Arch, run: Run, leaf: Any, group: str) -> Any:
    """Return a run's part of a stacked leaf as [repeats, entries per period, ...]; [repeats, ...] for a period of one layer."""
    kinds = layer_kinds(arch)
    start, stop = (_index(kinds, run.first + run.period * passes, group) for passes in (0, run.repeats))
    part = leaf if (start, stop) == (0, leaf.shape[0]) else leaf[start:stop]
    # Not even a dim of size 1 is added to what is scanned layer by layer: XLA would copy it away again in every pass.
    return part if run.period == 1 else part.reshape(run.repeats, (stop - start) // run.repeats, *leaf.shape[1:])


def _places(arch: Arch, run: Run, offset: int, index: Int[Array, ""], names: Iterable[str]) -> dict[str, Int[Array, ""]]:
    """Return where along the named parameters of its stack a layer lies: number `offset` of one pass of a run."""
    kinds = layer_kinds(arch)

    def place(group: str) -> Array:
        start, after = (_index(kinds, run.first + run.period * passes, group) for passes in (0, 1))
        return index * (after - start) + _index(kinds, run.first + offset, group)

    return {name: place(_GROUPS.get(name, "all")) for name in names}


def _layer(weights: Mapping[str, Any], kinds: Sequence[LayerKind], layer: int) -> Params:
    """Return one layer's part of a stack's parameters."""
    absent = "dense" if kinds[layer].experts else "experts"
    present = {name: part for name, part in weights.items() if _GROUPS.get(name) != absent}
    return _of_groups(present, lambda leaf, group: leaf[_index(kinds, layer, group)])


def _interleaved(parts: Sequence[Any]) -> Any:
    """Return what each layer of a period gave in every pass, in the order of the layers."""

    def join(*leaves: Array) -> Array:
        return leaves[0] if len(leaves) == 1 else jnp.stack(leaves, 1).reshape(-1, *leaves[0].shape[1:])

    return jax.tree.map(join, *parts)


def _joined(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def _look_up(table: Float[Array, "v d"], tokens: Int[Array, "b s"]) -> Float[Array, "b s d"]:
    """Return the rows of the table in float32."""
    if table.dtype != jnp.bfloat16:
        return jnp.take(table, tokens, axis=0).astype(jnp.float32)
    # XLA:CPU would convert the whole table before it takes rows of bfloat16; rows of integers it takes as they are.
    # The barrier keeps that reinterpretation, which XLA:CPU makes a copy, from being moved out of a loop and away from them.
    table, tokens = jax.lax.optimization_barrier((table, tokens))
    bits = jnp.take(jax.lax.bitcast_convert_type(table, jnp.uint16), tokens, axis=0)
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)


def logits(decoder: Decoder, hidden: Float[Array, "*b d"]) -> Float[Array, "*b v"]:
    """Return float32 logits of every vocabulary entry; -inf for padding rows of the table."""
    arch = decoder.arch
    out = jnp.einsum("...d,vd->...v", hidden, decoder.head_table, preferred_element_type=jnp.float32)
    if arch.final_soft_cap is not None:
        out = soft_cap(out, arch.final_soft_cap)
    if arch.valid_vocab is not None:
        columns = jnp.arange(arch.vocab_size).reshape((1,) * (out.ndim - 1) + (-1,))
        out = jnp.where(columns < arch.valid_vocab, out, -jnp.inf)
    return out


@cache
def _blueprint(arch: Arch, stacked: bool = True) -> tuple[Any, Any]:
    """Return the module's graph definition and its abstract parameters with their metadata."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(arch, nnx.Rngs(0), stacked)))


@cache
def _block_graph(arch: Arch, experts: bool) -> Any:
    """Return the graph definition of one block, with experts or without."""
    layer = next(layer for layer in arch.layers if arch.has_experts(layer) == experts)
    return nnx.split(nnx.eval_shape(lambda: Block(arch, nnx.Rngs(0), (layer,), stacked=False, outputs_first=False)))[0]


def merge(arch: Arch, params: Params) -> Decoder:
    """Return the decoder made of `params`, a nested dict of arrays; stacked or, as `unstack` returns them, separate.

    They may have the factors of an adapter among them, see `lora.attach`; stacked ones may be quantised, see `quantized.py`,
    or come with sums for their gradients, see `sums.py`.
    """
    params = dict(params)
    sums = params.pop(SUMS, {})
    stacked = "qkv" in params["layers"]
    if stacked:
        layers, factors = detach(params["layers"])
    else:
        split = {number: detach(layer) for number, layer in params["layers"].items()}
        layers, factors = ({number: parts[side] for number, parts in split.items()} for side in (0, 1))
    decoder = nnx.merge(_blueprint(arch, stacked)[0], {**params, "layers": layers})
    decoder.factors, decoder.sums = nnx.data(factors), nnx.data(sums)
    return decoder


def unstack(arch: Arch, params: Params) -> Params:
    """Return the parameters in the sampler's layout: one entry per block, output dims first."""
    kinds = layer_kinds(arch)
    turned = {
        name: jnp.moveaxis(part, range(1, 1 + INPUTS[name]), range(-INPUTS[name], 0)) if name in INPUTS else part
        for name, part in params["layers"].items()
    }
    return {**params, "layers": {layer: _layer(turned, kinds, layer) for layer in arch.layers}}


def abstract_params(arch: Arch, dtype: jnp.dtype = jnp.dtype("float32"), stacked: bool = True) -> Params:
    """Return shapes and types of all parameters, as the nested dict that `merge` takes."""
    leaves = nnx.to_pure_dict(_blueprint(arch, stacked)[1])
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), leaves)


def logical_axes(arch: Arch, stacked: bool = True) -> dict[str, Any]:
    """Return the logical axis names of every parameter, in the shape of `abstract_params`."""
    return _metadata(arch, "axes", stacked)


def decaying(arch: Arch) -> dict[str, Any]:
    """Return which parameters weight decay is for: matrices, not scales and biases."""
    return _metadata(arch, "decays", True)


def _metadata(arch: Arch, name: str, stacked: bool) -> dict[str, Any]:
    return nnx.to_pure_dict(
        jax.tree.map(
            lambda variable: variable.replace(variable.get_metadata()[name]),
            _blueprint(arch, stacked)[1],
            is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
        )
    )


def init_params(arch: Arch, seed: int) -> Params:
    """Return random float32 parameters: normal weights of standard deviation 0.02, unit norms, no biases."""
    return nnx.to_pure_dict(nnx.split(Decoder(arch, nnx.Rngs(seed)))[1])


def count(arch: Arch) -> int:
    """Return the number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_params(arch)))
