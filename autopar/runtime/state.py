"""All that training goes on from, as one state dict.

Keys of parameters are the original model's, in the optimizer's state too. Parameters and their
optimizer state are DTensors of the stored dtype and layout: master weights where there are any. A
parameter on several stages has one key where their meshes are alike; a checkpoint does not take two
layouts of one tensor, so a stage whose mesh is another than the first one's adds its number to it.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from autopar.errors import PlanMismatch
from autopar.runtime.engine import Engine
from autopar.runtime.loss_scale import LossScale
from autopar.runtime.parameters import ParameterStore


def training_state(
    store: ParameterStore,
    engine: Engine,
    optimizer: Optimizer | None,
    loss_scale: LossScale | None = None,
) -> dict[str, Any]:
    """This rank's part of `model`, `optimizer`, `loss_scale` and `step`."""
    keys = _own_keys(store)
    model = {keys.get(name, name): value for name, value in store.tree.state_dict().items()}
    state: dict[str, Any] = {"model": model, "step": engine.step}
    if optimizer is not None:
        state["optimizer"] = _optimizer_state(store, optimizer)
    if loss_scale is not None:
        state["loss_scale"] = loss_scale.state_dict()
    return state


def load_training_state(
    state: dict[str, Any],
    store: ParameterStore,
    engine: Engine,
    optimizer: Optimizer | None,
    loss_scale: LossScale | None = None,
) -> None:
    """Go on from a state of the same plan. All ranks call.

    Raises PlanMismatch where parameters are missing, unknown, or of another shape.
    """
    names = {key: name for name, key in _own_keys(store).items()}
    try:
        model = {names.get(key, key): value for key, value in state["model"].items()}
        store.tree.load_state_dict(model)
    except RuntimeError as error:
        raise PlanMismatch(f"the state is of another model or plan: {error}") from error
    if optimizer is not None:
        _load_optimizer(state["optimizer"], store, optimizer)
    if loss_scale is not None and "loss_scale" in state:
        loss_scale.load_state_dict(state["loss_scale"])
    engine.step = int(state["step"])
    store.update.refresh()


def _own_keys(store: ParameterStore) -> dict[str, str]:
    """Keys, by name, of what this rank holds on another mesh than the first stage that owns it."""
    meshes = store.world.meshes
    return {
        name: f"{name}@stage{entry.home}"
        for entry in store.entries.values()
        if meshes[entry.stages[0]].sizes != entry.mesh.sizes
        for name in entry.spec.names
    }


def _parameter_keys(store: ParameterStore) -> dict[int, str]:
    """The key of every parameter, by its `id`."""
    keys = _own_keys(store)
    return {id(p): keys.get(name, name) for name, p in store.tree.named_parameters()}


def _optimizer_state(store: ParameterStore, optimizer: Optimizer) -> dict[str, Any]:
    """State by the key of a parameter, and the options of every group."""
    names = _parameter_keys(store)
    return {
        "state": {names[id(p)]: dict(s) for p, s in optimizer.state.items() if id(p) in names},
        "param_groups": [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
    }


def _load_optimizer(state: dict[str, Any], store: ParameterStore, optimizer: Optimizer) -> None:
    names = _parameter_keys(store)
    # torch numbers the parameters of all groups one after the other.
    numbered: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    count = 0
    for group, options in zip(optimizer.param_groups, state["param_groups"], strict=True):
        members = range(count, count + len(group["params"]))
        count += len(members)
        groups.append({**options, "params": list(members)})
        for number, parameter in zip(members, group["params"], strict=True):
            found = state["state"].get(names.get(id(parameter), ""))
            if found is not None:
                numbered[number] = found
    optimizer.load_state_dict({"state": numbered, "param_groups": groups})
