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


def step_price(cluster: Cluster, step_s: float, samples: int) -> float | None:
    """What a sample costs: the whole cluster for a step, over the samples of the step."""
    hourly = hourly_price(cluster)
    return None if hourly is None else hourly * step_s / _HOUR_S / samples


def sample_price(plan: Plan) -> float | None:
    """What a sample of a plan costs, as predicted."""
    return step_price(plan.cluster, plan.prediction.step_s, plan.training.global_batch)
