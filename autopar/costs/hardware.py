"""The table of devices and of the links they usually come with. A new device is one row.

Figures are public; `DeviceSpec.source` and `Links.source` say where each is from, what is measured
and what is assumed. Memory sold as "80 GB" is 80 GiB (vendors print GB for the binary unit). Peak
rates are dense. Link figures are effective ones: fitted to collectives of all sizes where there are
any, so that a bandwidth lies near what large messages reach, and a latency near what the smallest
take.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.ir.cluster import DeviceSpec

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """Links of a device: bytes/s per device and direction, and seconds per collective step.

    `scale_up_devices` is how many devices the node link joins where that is more than one node.
    """

    node_bandwidth_bytes_s: float
    node_latency_s: float
    network_bandwidth_bytes_s: float
    network_latency_s: float
    scale_up_devices: int = 0
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareRow:
    """A device, how many of it a node usually has, and their links."""

    device: DeviceSpec
    devices_per_node: int = 8
    links: Links


_MLE = "github.com/stas00/ml-engineering@744d01e compute/accelerator/README.md"
_MLE_NET = "github.com/stas00/ml-engineering@744d01e network/README.md"
_AWS = "github.com/awslabs/awsome-distributed-training micro-benchmarks, nccl-tests on p5.48xlarge"
_SLIDES = "NVIDIA GTC24 s62129 and GTC25 s72583 slides"

NIC_EFFICIENCY = 0.92
"""Share of the line rate reached by a multi-node all-reduce: DGX H100, 370 of 8 x 50 GB/s."""


def _nic(gbit_s: float) -> float:
    """Effective bytes/s of a network card of `gbit_s` per device."""
    return gbit_s * 1e9 / 8 * NIC_EFFICIENCY


def _rates(half: float, float32: float, float8: float | None = None) -> dict[str, float]:
    """TFLOP/s of a device whose bfloat16 and float16 rates are equal."""
    rates = {"bfloat16": half, "float16": half, "float32": float32}
    return rates if float8 is None else rates | {"float8_e4m3fn": float8, "float8_e5m2": float8}


def _device(
    name: str,
    source: str,
    *,
    memory_gib: float,
    memory_gb_s: float,
    tflops: dict[str, float],
    measured_tflops: float | None = None,
    kind: str = "cuda",
    kernel_launch_s: float = 5e-6,
) -> DeviceSpec:
    """`measured_tflops` is the best bfloat16 matmul measured; without it 0.75 of peak is taken."""
    if measured_tflops is None:
        efficiency, note = 0.75, "matmul efficiency 0.75 assumed"
    else:
        efficiency = round(measured_tflops / tflops["bfloat16"], 3)
        note = f"best bfloat16 matmul measured {measured_tflops:g} TFLOP/s"
    return DeviceSpec(
        name=name,
        kind=kind,
        memory_bytes=int(memory_gib * GIB),
        memory_bandwidth_bytes_s=memory_gb_s * 1e9,
        peak_flops=tuple((dtype, rate * 1e12) for dtype, rate in tflops.items()),
        matmul_efficiency=efficiency,
        kernel_launch_s=kernel_launch_s,
        source=f"{source}; {note}",
    )


_FITTED = "benchmarks/collectives.py --fit"

_A100_LINKS = Links(
    node_bandwidth_bytes_s=232e9,
    node_latency_s=11.8e-6,
    network_bandwidth_bytes_s=24e9,
    network_latency_s=65e-6,
    source=f"node: {_FITTED}, to {_MLE_NET}, 8 x A100 all_reduce_perf; network: {_SLIDES}, "
    f"DGX A100 8 x 200 Gb/s reaches 192 GB/s a node; network latency: {_FITTED}, to nccl-tests on "
    "two p4de.24xlarge",
)
_H100_LINKS = Links(
    node_bandwidth_bytes_s=427e9,
    node_latency_s=4.2e-6,
    network_bandwidth_bytes_s=_nic(400),
    network_latency_s=30e-6,
    source=f"node: {_FITTED}, to {_AWS} (rings without NVLS reach 361 GB/s); "
    f"network: {_SLIDES}, DGX H100 8 x 400 Gb/s reaches 370 GB/s a node; "
    f"network latency: {_FITTED}, to two nodes of {_AWS}",
)
_H200_LINKS = replace(
    _H100_LINKS,
    node_bandwidth_bytes_s=481e9,
    node_latency_s=7.2e-6,
    source=f"{_H100_LINKS.source}; node: {_FITTED}, to {_MLE_NET}, 8 x H200 all_reduce_bench",
)
_H800_LINKS = replace(
    _H100_LINKS,
    node_bandwidth_bytes_s=158e9,
    source="node: github.com/deepseek-ai/DeepEP@567632d README.md, 158 GB/s of about 160 usable; "
    "network: 400 Gb/s a device; latencies as of H100",
)
_BLACKWELL_LINKS = Links(
    node_bandwidth_bytes_s=754e9,
    node_latency_s=9.4e-6,
    network_bandwidth_bytes_s=37e9,
    network_latency_s=51e-6,
    source=f"node and latencies: {_FITTED}, to {_MLE_NET}, 8 and 32 x B200 all_reduce_bench (rings "
    "without NVLS reach 680 GB/s); network: the same, 400 Gb/s a device, 382 GB/s bus bandwidth",
)
_B300_LINKS = replace(
    _BLACKWELL_LINKS,
    network_bandwidth_bytes_s=2 * 37e9,
    source="node as of B200; network: 800 Gb/s a device, unverified, at the efficiency of B200",
)
_NVL72_LINKS = replace(
    _BLACKWELL_LINKS,
    scale_up_devices=72,
    node_bandwidth_bytes_s=680e9,
    source=f"node: NVLink joins 72 devices, {_SLIDES}, 680 GB/s all-reduce, latency as of B200; "
    "network as of B200 (400 Gb/s a device)",
)
_V100_LINKS = Links(
    node_bandwidth_bytes_s=122e9,
    node_latency_s=12e-6,
    network_bandwidth_bytes_s=_nic(50),
    network_latency_s=60e-6,
    source=f"node: {_SLIDES}, NVLink2 all-reduce 122 GB/s; network: DGX-1V 4 x 100 Gb/s for 8 "
    "devices; latencies as of A100",
)
_MI300X_LINKS = Links(
    node_bandwidth_bytes_s=313e9,
    node_latency_s=12e-6,
    network_bandwidth_bytes_s=_nic(400),
    network_latency_s=60e-6,
    source=f"node: {_MLE_NET}, 312.9 GB/s all-reduce over 8 (a mesh of 64 GB/s links: groups of 2 "
    "reach only 47.7); network: 400 Gb/s a device, unverified; latencies assumed",
)
_ONE_NIC = f"network: one 200 Gb/s card a node assumed, 24 GB/s shared by 8 ({_SLIDES})"
_PCIE4_LINKS = Links(
    node_bandwidth_bytes_s=24e9,
    node_latency_s=12e-6,
    network_bandwidth_bytes_s=3e9,
    network_latency_s=60e-6,
    source=f"node: {_SLIDES}, PCIe 4 all-reduce 24 GB/s; {_ONE_NIC}; latencies assumed",
)
_PCIE5_LINKS = replace(
    _PCIE4_LINKS,
    node_bandwidth_bytes_s=48e9,
    source=f"node: {_SLIDES}, PCIe 5 all-reduce 48 GB/s; {_ONE_NIC}; latencies assumed",
)
_NO_PEER_LINKS = replace(
    _PCIE4_LINKS,
    node_bandwidth_bytes_s=12e9,
    source="node: PCIe 4 without peer-to-peer, half of its 24 GB/s assumed; "
    f"{_ONE_NIC}; latencies assumed",
)

_A100 = _rates(312, 19.5)
_H100 = _rates(989, 67, 1979)
_MI300X = _rates(1300, 163.4, 2610)
_V100 = {"float16": 125.0, "float32": 15.7}
_V100_SOURCE = (
    "github.com/bigscience-workshop/bigscience@9e64edec experiments/gpt2.md, 125 TFLOP/s; no "
    "bfloat16 units, so bfloat16 runs at the float32 rate; other figures unverified"
)

_ROWS = (
    HardwareRow(
        device=_device(
            "a100-40gb",
            _MLE,
            memory_gib=40,
            memory_gb_s=1555,
            tflops=_A100,
            measured_tflops=259.2,
        ),
        links=_A100_LINKS,
    ),
    HardwareRow(
        device=_device(
            "a100-80gb",
            _MLE,
            memory_gib=80,
            memory_gb_s=2000,
            tflops=_A100,
            measured_tflops=271.2,
        ),
        links=_A100_LINKS,
    ),
    HardwareRow(
        device=_device(
            "a100-pcie-80gb",
            _MLE,
            memory_gib=80,
            memory_gb_s=1940,
            tflops=_A100,
            measured_tflops=252.9,
        ),
        links=_PCIE4_LINKS,
    ),
    HardwareRow(
        device=_device(
            "h100-sxm",
            _MLE,
            memory_gib=80,
            memory_gb_s=3350,
            tflops=_H100,
            measured_tflops=794.5,
        ),
        links=_H100_LINKS,
    ),
    HardwareRow(
        device=_device(
            "h100-pcie", _MLE, memory_gib=80, memory_gb_s=2000, tflops=_rates(756, 51, 1513)
        ),
        links=_PCIE5_LINKS,
    ),
    HardwareRow(
        device=_device(
            "h200-sxm",
            _MLE,
            memory_gib=141,
            memory_gb_s=4800,
            tflops=_H100,
            measured_tflops=794.5,
        ),
        links=_H200_LINKS,
    ),
    HardwareRow(
        device=_device(
            "h800-sxm",
            "vendor figures, unverified: an H100 SXM with a slower NVLink",
            memory_gib=80,
            memory_gb_s=3350,
            tflops=_H100,
        ),
        links=_H800_LINKS,
    ),
    HardwareRow(
        device=_device(
            "b200",
            _MLE,
            memory_gib=180,
            memory_gb_s=8000,
            tflops=_rates(2250, 80, 4500),
            measured_tflops=1745.0,
        ),
        links=_BLACKWELL_LINKS,
    ),
    HardwareRow(
        device=_device(
            "b300",
            _MLE,
            memory_gib=288,
            memory_gb_s=8000,
            tflops=_rates(2250, 80, 4500),
            measured_tflops=1769.0,
        ),
        links=_B300_LINKS,
    ),
    HardwareRow(
        device=_device(
            "gb200",
            _MLE,
            memory_gib=186,
            memory_gb_s=8000,
            tflops=_rates(2500, 80, 5000),
            measured_tflops=1822.0,
        ),
        devices_per_node=4,
        links=_NVL72_LINKS,
    ),
    HardwareRow(
        device=_device(
            "mi300x",
            _MLE,
            memory_gib=192,
            memory_gb_s=5300,
            tflops=_MI300X,
            measured_tflops=668.4,
        ),
        links=_MI300X_LINKS,
    ),
    HardwareRow(
        device=_device(
            "mi325x",
            _MLE,
            memory_gib=256,
            memory_gb_s=6000,
            tflops=_MI300X,
            measured_tflops=784.9,
        ),
        links=_MI300X_LINKS,
    ),
    HardwareRow(
        device=_device(
            "mi250x",
            f"{_MLE}: half of an MI250X, for a framework sees its two dies as two devices",
            memory_gib=64,
            memory_gb_s=1640,
            tflops=_rates(191.5, 23.95),
        ),
        links=replace(
            _MI300X_LINKS,
            node_bandwidth_bytes_s=50e9,
            network_bandwidth_bytes_s=_nic(100),
            source=f"node: {_MLE_NET}, 50 GB/s between two devices; network: 4 x 200 Gb/s for 8 "
            "devices, unverified; latencies assumed",
        ),
    ),
    HardwareRow(
        device=_device("v100-32gb", _V100_SOURCE, memory_gib=32, memory_gb_s=900, tflops=_V100),
        links=_V100_LINKS,
    ),
    HardwareRow(
        device=_device("v100-16gb", _V100_SOURCE, memory_gib=16, memory_gb_s=900, tflops=_V100),
        links=_V100_LINKS,
    ),
    HardwareRow(
        device=_device(
            "l40s",
            f"{_MLE}; of its 48 GiB error correction takes some: github.com/QwenLM/Qwen3-VL/issues/"
            "2097, 44.40 GiB in all",
            memory_gib=44.4,
            memory_gb_s=860,
            tflops=_rates(362, 91.6, 733),
        ),
        links=_PCIE4_LINKS,
    ),
    HardwareRow(
        device=_device(
            "a10g",
            "vendor figures, compute rates unverified",
            memory_gib=24,
            memory_gb_s=600,
            tflops=_rates(70, 31.2),
        ),
        links=replace(
            _NO_PEER_LINKS,
            network_bandwidth_bytes_s=_nic(12.5),
            source="node: PCIe 4 without peer-to-peer, half of its 24 GB/s assumed; network: AWS "
            "g5.48xlarge, 100 Gb/s for 8 devices; latencies assumed",
        ),
    ),
    HardwareRow(
        device=_device(
            "rtx4090",
            "vendor figures with float32 accumulation, unverified",
            memory_gib=24,
            memory_gb_s=1008,
            tflops=_rates(165.2, 82.6, 330.3),
        ),
        links=_NO_PEER_LINKS,
    ),
    HardwareRow(
        device=_device(
            "rtx3090",
            "vendor figures with float32 accumulation, unverified",
            memory_gib=24,
            memory_gb_s=936.2,
            tflops=_rates(71, 35.58),
        ),
        links=_NO_PEER_LINKS,
    ),
    HardwareRow(
        device=_device(
            "cpu",
            "one core of a server CPU, conservative; a measured profile replaces it",
            memory_gib=2,
            memory_gb_s=5,
            tflops={"float32": 0.1, "float64": 0.05},
            kind="cpu",
            kernel_launch_s=7e-6,
        ),
        devices_per_node=4,
        links=Links(
            node_bandwidth_bytes_s=0.8e9,
            node_latency_s=200e-6,
            network_bandwidth_bytes_s=_nic(10) / 4,
            network_latency_s=400e-6,
            source="node: gloo all-reduce between processes of one host, conservative; network: "
            "one 10 Gb/s card for 4 processes assumed",
        ),
    ),
)

DEVICES: dict[str, HardwareRow] = {row.device.name: row for row in _ROWS}
"""Every device, by the name cluster specs use."""
