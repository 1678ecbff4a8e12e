"""What running a plan costs, where the devices have prices."""

from __future__ import annotations

from autopar.ir.cluster import Cluster
from autopar.plan.plan import Plan

_HOUR_S = 3600.0


def price_text(price: float) -> str:
    """A price to four digits, however small: `98.4`, `0.001736`."""
    return f"{price:.4g}"


def hourly_price(cluster: Cluster) -> float | None:
    """What the cluster costs an hour; None where the price of some device is not known."""
    total = 0.0
    for group in cluster.groups:
        if group.device.price_per_hour is None:
            return None
        total += group.num_devices * group.device.price_per_hour
    return total


def sample_price(plan: Plan) -> float | None:
    """What a sample costs: the whole cluster for a step, over the samples of the step."""
    hourly = hourly_price(plan.cluster)
    if hourly is None:
        return None
    return hourly * plan.prediction.step_s / _HOUR_S / plan.training.global_batch
