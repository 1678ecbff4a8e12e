"""Which values of a graph say where tokens go: the sort by expert, its inverse, counts, offsets.

Models send tokens to experts without dropping any by sorting: choices are sorted by expert, tokens
gathered in that order, the rows of each expert multiplied by its weights in one grouped product,
and the results put back. There are many spellings. What each value is follows from how it is
computed, from the tensor of choices on; names of modules play no part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from autopar.ir.graph import OpNode, Ref, TensorSpec
from autopar.ir.size import Shape, Size


class Meaning(Enum):
    """What a value is to a routing of N choices among E experts."""

    SORTED = auto()
    """[N] the experts chosen, ascending."""
    ORDER = auto()
    """[N] the choice that stands at each place of the sorted order."""
    TOKEN = auto()
    """[N] the token of that choice: `ORDER // k`."""
    INVERSE = auto()
    """[N] the place at which each choice stands."""
    ONE_HOT = auto()
    """[..., E] one where a choice is the expert."""
    COUNTS = auto()
    """[E] how many choices each expert has."""
    OFFSETS = auto()
    """[E] running sums of `COUNTS`."""
    SLOTS = auto()
    """[N, ...] rows in sorted order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """A value's meaning, for the routing whose choices are `chosen`.

    `number` is the number of choices a token for `TOKEN`, of experts for `ONE_HOT` and `COUNTS`.
    `spread` tells that an [N] value was repeated over further dims.
    """

    meaning: Meaning
    chosen: Ref
    number: int = 0
    spread: bool = False


VIEWS = frozenset(
    f"aten.{name}" for name in ("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze")
)
COPIES = frozenset(("aten.to", "aten.clone", "aten.contiguous", "aten.detach", "aten._to_copy"))
SORTS = {"aten.sort.default": 2, "aten.argsort.default": 2}
SORTS |= {"aten.sort.stable": 3, "aten.argsort.stable": 3}
"""Op to the position of `descending`."""

_INTEGERS = frozenset(("int64", "int32"))
_ZEROS = frozenset(("aten.zeros", "aten.new_zeros", "aten.zeros_like"))
_ONES = frozenset(("aten.ones", "aten.new_ones", "aten.ones_like"))
_BLANK = _ZEROS | {"aten.empty_like", "aten.empty", "aten.new_empty"}

ROW_WISE = frozenset(
    f"aten.{name}"
    for name in (
        "add", "sub", "rsub", "mul", "div", "neg", "abs", "pow", "square", "sqrt", "rsqrt", "exp",
        "log", "tanh", "sigmoid", "relu", "relu6", "silu", "gelu", "elu", "leaky_relu", "softplus",
        "mish", "hardswish", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "to", "clone",
        "contiguous", "detach", "chunk", "split", "split_with_sizes", "slice", "select", "unbind",
        "unsqueeze", "view", "reshape", "mean", "sum", "linear", "layer_norm", "rms_norm",
        "softmax", "type_as", "reciprocal", "where", "masked_fill",
    )
)  # fmt: skip
"""Ops that make row i of their result from row i of their inputs, unless they work along dim 0.
Dropout is none: its mask is drawn by position, and positions differ between plans."""

_ALONG = {"aten.softmax": 1, "aten.sum": 1, "aten.mean": 1, "aten.slice": 1, "aten.select": 1}
_ALONG |= {"aten.chunk": 2, "aten.split": 2, "aten.split_with_sizes": 2, "aten.unbind": 1}
_ALONG |= {"aten.unsqueeze": 1}
"""Position of the dims an op works along."""


class Facts:
    """The facts of a graph, found in one walk."""

    def __init__(self, nodes: Sequence[OpNode], specs: Mapping[Ref, TensorSpec]) -> None:
        self.specs = specs
        self.known: dict[Ref, Fact] = {}
        self._makers: dict[Ref, OpNode] = {}
        for node in nodes:
            for index in range(len(node.outputs)):
                self._makers[Ref(node.name, index)] = node
            self._visit(node)

    def of(self, ref: object, *meanings: Meaning) -> Fact | None:
        """The fact about a value, if it has one of these meanings."""
        fact = self.known.get(ref) if isinstance(ref, Ref) else None
        return fact if fact and (not meanings or fact.meaning in meanings) else None

    def choices(self, ref: object) -> Ref | None:
        """The integer tensor that `ref` is a view or cast of; None for any other value."""
        if not isinstance(ref, Ref):
            return None
        while (maker := self._makers.get(ref)) is not None and maker.op in VIEWS | COPIES:
            source = maker.inputs()[0]
            if self.specs[source].dtype not in _INTEGERS:
                break
            ref = source
        return ref if self.specs[ref].dtype in _INTEGERS else None

    def rows(self, ref: Ref) -> Size:
        """Extent of dim 0."""
        return self.specs[ref].shape[0]

    def blank(self, ref: object) -> bool:
        """Whether a value is zeros or not set yet."""
        maker = self._makers.get(ref) if isinstance(ref, Ref) else None
        return maker is not None and maker.op in _BLANK

    def _is(self, ref: object, ops: frozenset[str]) -> bool:
        maker = self._makers.get(ref) if isinstance(ref, Ref) else None
        return maker is not None and maker.op in ops

    def _is_positions(self, ref: object) -> bool:
        maker = self._makers.get(ref) if isinstance(ref, Ref) else None
        return maker is not None and maker.op == "aten.arange" and len(maker.args) == 1

    def _visit(self, node: OpNode) -> None:
        for target in (node.target, node.op):
            if find := _FINDERS.get(target):
                find(self, node)
                return
        if node.op in VIEWS | COPIES or node.op == "aten.expand":
            self._passed_on(node)

    def _note(self, node: OpNode, fact: Fact | None, index: int = 0) -> None:
        if fact is not None:
            self.known[Ref(node.name, index)] = fact

    def _passed_on(self, node: OpNode) -> None:
        """Casts keep a meaning; an [N] value may be spread over columns."""
        fact = self.of(node.inputs()[0])
        if fact is None or fact.meaning in (Meaning.SLOTS, Meaning.ONE_HOT):
            return
        before, after = self.specs[node.inputs()[0]].shape, node.outputs[0].shape
        if before == after:
            self._note(node, fact)
        elif before[:1] == after[:1] and (before[1:] == () or fact.spread):
            self._note(node, replace(fact, spread=True))

    def sort(self, node: OpNode) -> None:
        """A sort of the choices; or of their order, which inverts it."""
        source = node.inputs()[0]
        if len(self.specs[source].shape) != 1 or node.arg(SORTS[node.target], "descending", False):
            return
        last = len(node.outputs) - 1
        if fact := self.of(source, Meaning.ORDER):
            self._note(node, replace(fact, meaning=Meaning.INVERSE), last)
        elif self.of(source) is None and (chosen := self.choices(source)) is not None:
            if last:
                self._note(node, Fact(meaning=Meaning.SORTED, chosen=chosen))
            self._note(node, Fact(meaning=Meaning.ORDER, chosen=chosen), last)

    def divide(self, node: OpNode) -> None:
        """`ORDER // k`."""
        fact, number = self.of(node.args[0], Meaning.ORDER), node.args[1]
        floors = node.op == "aten.floor_divide" or node.arg(2, "rounding_mode") is not None
        if fact and floors and isinstance(number, int) and not fact.spread:
            self._note(node, replace(fact, meaning=Meaning.TOKEN, number=number))

    def one_hot(self, node: OpNode) -> None:
        """`one_hot(chosen, E)`."""
        fact, classes = self.of(node.args[0], Meaning.SORTED), node.arg(1, "num_classes", -1)
        chosen = fact.chosen if fact else self.choices(node.args[0])
        if chosen is not None and isinstance(classes, int) and classes > 0:
            self._note(node, Fact(meaning=Meaning.ONE_HOT, chosen=chosen, number=classes))

    def total(self, node: OpNode) -> None:
        """A sum of one-hot choices over all dims but the last."""
        fact = self.of(node.inputs()[0], Meaning.ONE_HOT)
        rank = len(self.specs[node.inputs()[0]].shape)
        dims = node.arg(1, "dim", ())
        listed = {d % rank for d in dims if isinstance(d, int)} if isinstance(dims, tuple) else ()
        if fact and set(listed) == set(range(rank - 1)) and len(node.outputs[0].shape) == 1:
            self._note(node, replace(fact, meaning=Meaning.COUNTS))

    def histogram(self, node: OpNode) -> None:
        """`histc(x, bins=E, min=0, max=E - 1)`: whole numbers fall each in a bin of its own."""
        bins, low, high = (node.arg(i, n) for i, n in ((1, "bins"), (2, "min"), (3, "max")))
        if isinstance(bins, int) and bins > 1 and (low, high) == (0, bins - 1):
            self._counted(node, node.inputs()[0], bins)

    def bin_count(self, node: OpNode) -> None:
        """`bincount(x, minlength=E)`."""
        experts = node.arg(2, "minlength", 0)
        if isinstance(experts, int) and node.outputs[0].shape == (Size(experts),):
            self._counted(node, node.inputs()[0], experts)

    def added_up(self, node: OpNode) -> None:
        """`zeros(E).scatter_add(0, chosen, ones)`."""
        refs, shape = node.inputs(), node.outputs[0].shape
        if len(refs) != 3 or len(shape) != 1 or not self._is(refs[0], _ZEROS):
            return
        if self._is(refs[2], _ONES) and self.rows(refs[2]) == self.rows(refs[1]):
            self._counted(node, refs[1], shape[0].const)

    def _counted(self, node: OpNode, ref: Ref, experts: int) -> None:
        fact = self.of(ref, Meaning.SORTED)
        chosen = fact.chosen if fact else self._integers_under(ref)
        if chosen is not None:
            self._note(node, Fact(meaning=Meaning.COUNTS, chosen=chosen, number=experts))

    def _integers_under(self, ref: Ref) -> Ref | None:
        """The choices under a cast to floating point, which `histc` needs on CPU."""
        maker = self._makers.get(ref)
        if maker is not None and maker.op in COPIES:
            ref = maker.inputs()[0]
        return self.choices(ref)

    def cumulate(self, node: OpNode) -> None:
        """Offsets."""
        if fact := self.of(node.inputs()[0], Meaning.COUNTS):
            self._note(node, replace(fact, meaning=Meaning.OFFSETS))

    def invert(self, node: OpNode) -> None:
        """`blank[ORDER] = arange(N)`, as index_put or scatter."""
        refs = node.inputs()
        position = 1
        if len(refs) != 3 or not self.blank(refs[0]) or not self._is_positions(refs[2]):
            return
        fact = self.of(refs[position], Meaning.ORDER)
        if fact and not fact.spread and len(node.outputs[0].shape) == 1:
            self._note(node, replace(fact, meaning=Meaning.INVERSE))


_FINDERS: dict[str, Callable[[Facts, OpNode], None]] = {
    **dict.fromkeys(SORTS, Facts.sort),
    "aten.floor_divide": Facts.divide,
    "aten.div.Tensor_mode": Facts.divide,
    "aten.div.Scalar_mode": Facts.divide,
    "aten.one_hot": Facts.one_hot,
    "aten.sum.dim_IntList": Facts.total,
    "aten.histc": Facts.histogram,
    "aten.bincount": Facts.bin_count,
    "aten.scatter_add": Facts.added_up,
    "aten.cumsum": Facts.cumulate,
    "aten.index_put": Facts.invert,
    "aten.scatter.src": Facts.invert,
}


def keeps_rows(node: OpNode, shapes: Sequence[Shape]) -> bool:
    """Whether each row of the outputs is made from the same row of the inputs (of these shapes)."""
    if node.op not in ROW_WISE:
        return False
    rank, rows = len(shapes[0]) + (node.op == "aten.unsqueeze"), shapes[0][:1]
    if node.op in _ALONG:
        dims = node.arg(_ALONG[node.op], "dim", 0 if node.op != "aten.sum" else ())
        listed = dims if isinstance(dims, tuple) else (dims,)
        if not listed or any(not isinstance(d, int) or d % rank == 0 for d in listed):
            return False
    return all(spec.shape[:1] == rows for spec in node.outputs)


__all__ = ["COPIES", "VIEWS", "Fact", "Facts", "Meaning", "keeps_rows"]
