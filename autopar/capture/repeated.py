"""Tracing a repeated module once: calls that are provably equal to one before are not run again.

While a model is exported, the first call of a module is traced as ever and kept as a template. A
later call of an equal module with equal arguments would make the same nodes, so one node is put in
their place, to be written out when the graph is converted (`expand.py`). Equal means:

- the modules have the same classes, submodules, parameters and buffers (shape, dtype, strides,
  whether they train, which are tied), and no hooks;
- every attribute that the traced call read from any of them has an equal value;
- arguments have the same structure, tensors agree in all but their values, other values are equal,
  and tensors that were the same or shared memory do so again;
- globals, closures, defaults and class attributes that the modules' code can read are as they were;
- the call left nothing behind: no attribute, argument, global or random state is changed, nothing
  that it was given is written to, and what it returns is new;
- gradient mode, autocast, default dtype and the line of the model that makes the call are the same.

Where any of this cannot be shown the call is traced.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopar.capture.locations import is_user_file
from autopar.capture.observe import STRUCTURE, Reads, attribute_key, observed
from autopar.capture.proxies import (
    current_tracer,
    last_node,
    node_of,
    nodes_after,
    path_of,
    real_module,
    record_call,
    unwatched,
)
from autopar.capture.state import Keys, Surroundings, Unprovable, is_trusted
from autopar.capture.templates import Template, build_template, tensor_key

_MOST_TEMPLATES = 4
"""Of calls alike but for what they read; more do not pay."""


class Call:
    """One call of a module as it begins. Raises Unprovable where it cannot be compared."""

    def __init__(self, tracer: Any, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.tracer = tracer
        self.modules = _modules_in(module)
        self.positions = {id(m): i for i, m in enumerate(self.modules)}
        self.keys = Keys(self.positions)
        self.given = (args, kwargs)
        self.leaves, self.structure = pytree.tree_flatten(self.given)
        state = [_state(m) for m in self.modules]
        given = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.tensors = given + [t for named in state for _, t in named if t is not None]
        self.nodes = [node_of(tracer, tensor) for tensor in self.tensors]
        with unwatched():
            tensors = tuple(map(tensor_key, self.tensors))
            storages = _pattern([t.untyped_storage()._cdata for t in self.tensors])
        self.key = (
            self._modules_key(state),
            self.structure,
            tuple(None if isinstance(v, Tensor) else self.keys.key(v) for v in self.leaves),
            tensors,
            _pattern(self.nodes),
            storages,
            _circumstances(),
        )

    def attribute(self, position: int, name: str) -> Hashable:
        """The key of an attribute as it is now."""
        return attribute_key(self.keys, self.modules[position], name)

    def _modules_key(self, state: Sequence[Sequence[tuple[str, Tensor | None]]]) -> Hashable:
        return tuple(
            (
                type(module),
                tuple((n, c and self.positions[id(real_module(c))]) for n, c in _children(module)),
                tuple((name, tensor is None) for name, tensor in named),
            )
            for module, named in zip(self.modules, state, strict=True)
        )


class Known:
    """A template with what another call must agree in: attributes read, and surroundings."""

    def __init__(
        self, template: Template, number: int, reads: Reads, surroundings: Surroundings
    ) -> None:
        self.template, self.number, self.reads = template, number, reads
        self._surroundings = surroundings

    def stands_for(self, call: Call) -> bool:
        """Whether a call with the same key would be traced to the same nodes."""
        try:
            same = all(
                call.attribute(*place) == key for place, key in self.reads.attributes.items()
            )
        except Unprovable:
            return False
        return same and not self._surroundings.changed()


class RepeatedCalls:
    """Shares traces among the calls of one export. `shared` counts those not traced."""

    def __init__(self, model: nn.Module) -> None:
        self.templates: list[Template] = []
        self.shared = 0
        self._known: dict[Hashable, list[Known]] = {}
        self._tried: Counter[Hashable] = Counter()
        self._classes = _classes(model)
        self._called: set[int] = set()
        self._reads: list[Reads] = []
        self._surroundings: dict[Hashable, Surroundings] = {}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within, calls of modules are shared."""
        original = nn.Module._call_impl

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._call(module, args, kwargs, lambda: original(module, *args, **kwargs))

        with mock.patch.object(nn.Module, "_call_impl", call):
            yield

    def _call(self, module: nn.Module, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        tracer, module = current_tracer(), real_module(module)
        if tracer is None or not self._may_repeat(module):
            return run()
        try:
            call = Call(tracer, module, args, kwargs)
            known = self._known.setdefault(call.key, [])
            found = next((each for each in known if each.stands_for(call)), None)
            if found is not None:
                return self._shared(found, call)
            if self._tried[call.key] >= _MOST_TEMPLATES:
                return run()
            self._tried[call.key] += 1
            surroundings = self._around(call)
        except Unprovable:
            return run()
        return self._traced(call, known, surroundings, run)

    def _may_repeat(self, module: nn.Module) -> bool:
        """Whether the module has an equal, as far as can be seen at once, or was called before."""
        again = id(module) in self._called
        self._called.add(id(module))
        simple = not module._modules and is_trusted(type(module))
        return not simple and (again or self._classes.get(id(module), 0) > 1)

    def _around(self, call: Call) -> Surroundings:
        keys = call.keys
        for module in call.modules:
            for name, value in vars(module).items():
                with contextlib.suppress(Unprovable):  # matters only if it is read
                    if name not in STRUCTURE:
                        keys.key(value)
        classes = [*map(type, call.modules), *keys.classes.values()]
        return Surroundings(dict.fromkeys(classes), keys.functions.values())

    def _traced(
        self, call: Call, known: list[Known], surroundings: Surroundings, run: Callable[[], Any]
    ) -> Any:
        reads = Reads(call.modules, call.keys)
        before, last = _trail(call), last_node(call.tracer)
        self._reads.append(reads)
        try:
            with observed(self._reads):
                output = run()
        finally:
            self._reads.pop()
        try:
            reads.check(Keys(call.positions))
            if before != _trail(call) or surroundings.changed():
                raise Unprovable("the call changed something")
            owners: dict[fx.Node, int] = {}
            for index, node in enumerate(call.nodes):
                owners.setdefault(node, index)
            template = build_template(
                call.tracer, nodes_after(last), call.tensors, owners, output, path_of(call.tracer)
            )
        except Unprovable:
            return output
        known.append(Known(template, len(self.templates), reads, surroundings))
        self.templates.append(template)
        return output

    def _shared(self, known: Known, call: Call) -> Any:
        template = known.template
        inputs = [call.tensors[i] for i in template.inputs]
        made = record_call(call.tracer, inputs, known.number, template.made)
        for reads in self._reads:
            reads.add(known.reads, call.modules)
        self.shared += 1
        sources = {"input": call.tensors, "made": made}
        leaves = [
            result.value if result.kind == "value" else sources[result.kind][result.index]
            for result in template.results
        ]
        return pytree.tree_unflatten(leaves, template.structure)


def _trail(call: Call) -> Hashable:
    """What a call might leave changed, but for what its code reads from its surroundings."""
    keys = Keys(call.positions)
    leaves, structure = pytree.tree_flatten(call.given)
    return (
        tuple(
            tuple(
                (name, id(value)) for name, value in (*vars(m).items(), *_children(m), *_state(m))
            )
            for m in call.modules
        ),
        structure,
        tuple(id(leaf) if isinstance(leaf, Tensor) else keys.key(leaf) for leaf in leaves),
        random.getstate(),
        _circumstances(),
    )


def _modules_in(module: nn.Module) -> list[nn.Module]:
    """The module and all below it, each once."""
    found: dict[int, nn.Module] = {}
    stack = [module]
    while stack:
        at = stack.pop()
        if id(at) in found:
            continue
        _refuse_unusual(at)
        found[id(at)] = at
        stack += [real_module(child) for _, child in reversed(_children(at)) if child is not None]
    return list(found.values())


def _children(module: nn.Module) -> list[tuple[str, nn.Module | None]]:
    return list(vars(module)["_modules"].items())


def _state(module: nn.Module) -> list[tuple[str, Tensor | None]]:
    return [*vars(module)["_parameters"].items(), *vars(module)["_buffers"].items()]


def _refuse_unusual(module: nn.Module) -> None:
    own = vars(module)
    if any(own.get(name) for name in _HOOKS):
        raise Unprovable("a hook")
    if type(module).__getattribute__ not in (object.__getattribute__, nn.Module.__getattribute__):
        raise Unprovable("attributes of its own making")


_HOOKS = tuple(
    name for name in vars(nn.Module()) if name.endswith(("_hooks", "_hooks_with_kwargs"))
)


def _classes(model: nn.Module) -> dict[int, int]:
    """How many modules of the model look like each, by its id."""
    forms: dict[int, Hashable] = {}
    numbers: dict[Hashable, int] = {}

    def form(module: nn.Module) -> int:
        if id(module) not in forms:
            forms[id(module)] = -1
            own = (
                type(module),
                tuple((name, child and form(child)) for name, child in _children(module)),
                tuple((name, None if t is None else t.shape) for name, t in _state(module)),
            )
            forms[id(module)] = numbers.setdefault(own, len(numbers))
        return forms[id(module)]  # type: ignore[return-value]

    form(model)
    counts = Counter(forms.values())
    return {key: counts[number] for key, number in forms.items()}


def _pattern(values: Sequence[Hashable]) -> tuple[int, ...]:
    """Which of the values are the same."""
    first: dict[Hashable, int] = {}
    return tuple(first.setdefault(value, i) for i, value in enumerate(values))


def _circumstances() -> Hashable:
    kinds = ("cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        tuple((torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds),
        _calling_line(),
    )


def _calling_line() -> tuple[str, int]:
    frame = sys._getframe(1)
    while frame is not None:
        if _is_user_file(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return "", 0


_is_user_file = lru_cache(maxsize=None)(is_user_file)
