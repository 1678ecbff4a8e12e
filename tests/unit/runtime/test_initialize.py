import pytest
import torch
from torch import nn

from autopar.errors import InputError
from autopar.runtime.deferred import deferred_init
from autopar.runtime.initialize import initial_values


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


def values(model, names=None, seed=0, tape=None):
    names = list(model.state_dict()) if names is None else names
    return dict(initial_values(model, names, seed=seed, tape=tape))


def test_real_models_keep_their_values():
    model = Net()
    for name, value in values(model).items():
        assert value.equal(model.state_dict()[name])


def test_meta_models_are_reset_module_by_module():
    with torch.device("meta"):
        model = Net()
    whole = values(model)
    assert whole["embed.weight"].std() > 0.5
    assert whole["norm.running_var"].equal(torch.ones(4))
    assert whole["norm.num_batches_tracked"].item() == 0
    alone = values(model, ["embed.weight"])
    assert alone["embed.weight"].equal(whole["embed.weight"])
    assert not values(model, seed=1)["embed.weight"].equal(whole["embed.weight"])
    assert all(p.is_meta for p in model.parameters())


def test_values_do_not_touch_the_generator():
    with torch.device("meta"):
        model = Net()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    values(model)
    assert torch.get_rng_state().equal(before)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class Half(Own):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(3.0))

    def reset_parameters(self):
        nn.init.ones_(self.scale)


def test_what_nothing_fills_is_named():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Own(), Half())
    with pytest.raises(InputError, match=r"1\.scale is on the meta device, and Own has no"):
        values(model, ["1.scale"])
    with pytest.raises(InputError, match=r"2\.table is on the meta device, and Half\.reset"):
        values(model, ["2.scale"])
    with pytest.raises(InputError, match="no parameter or buffer 'nobody'"):
        values(model, ["nobody"])


class Posted(nn.Module):
    """Weights are filled by code outside the modules, as Hugging Face's are."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.own = Own()
        self.register_buffer("table", torch.arange(8.0).view(2, 4).t().contiguous())
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril(), persistent=False)
        self.last = nn.Linear(4, 6)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.data.normal_(std=0.02)
                nn.init.zeros_(module.bias)
        nn.init.trunc_normal_(self.first.weight, std=2.0, a=-3.0, b=3.0)
        with torch.no_grad():
            self.last.weight[2].fill_(7.0)
            self.last.weight[:, 0] *= 0.5
            nn.init.orthogonal_(self.own.scale.view(1, 3))
        self.last.bias = nn.Parameter(self.first.weight.data.sum() * torch.ones(6))


def test_deferred_init_runs_the_models_own_code():
    with deferred_init() as tape:
        model = Posted()
    assert model.first.weight.is_meta
    names = [n for n, _ in (*model.named_parameters(), *model.named_buffers())]
    have = values(model, names, tape=tape)
    real = Posted()
    for name in ("table", "mask", "first.bias"):
        assert have[name].equal(dict((*real.named_parameters(), *real.named_buffers()))[name])
    assert have["last.weight"][2, 1:].eq(7.0).all()
    assert have["last.weight"][2, 0] == 3.5
    assert 0 < have["last.weight"][0].abs().max() < 0.2
    assert 0.5 < have["first.weight"].abs().max() <= 3.0
    torch.testing.assert_close(have["own.scale"].norm(), torch.tensor(1.0))
    torch.testing.assert_close(have["last.bias"], have["first.weight"].sum().expand(6))
    for name in names:
        assert values(model, [name], tape=tape)[name].equal(have[name])
    assert not values(model, names, seed=1, tape=tape)["first.weight"].equal(have["first.weight"])


def test_deferred_init_replays_helpers_made_where_the_weights_are():
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("frequencies", torch.empty(4))
            steps = torch.arange(4, device=self.frequencies.device)
            self.frequencies.copy_(2.0**-steps)

    with deferred_init() as tape:
        model = Rotary()
    assert model.frequencies.is_meta
    (_, value), *_ = initial_values(model, ["frequencies"], tape=tape)
    assert value.tolist() == [1.0, 0.5, 0.25, 0.125]


def test_deferred_init_fills_a_hugging_face_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=20, n_positions=8, initializer_range=0.02
    )
    with deferred_init() as tape:
        model = transformers.GPT2LMHeadModel(config)
    names = [n for n, _ in (*model.named_parameters(), *model.named_buffers())]
    have = values(model, names, tape=tape)
    real = transformers.GPT2LMHeadModel(config)
    for name, value in (*real.named_parameters(), *real.named_buffers()):
        assert have[name].shape == value.shape
        assert have[name].dtype == value.dtype
        if value.numel() > 100:
            ratio = (have[name].float().std() / value.float().std()).item()
            assert 0.7 < ratio < 1.4, name
        else:
            torch.testing.assert_close(have[name].mean(), value.mean(), atol=0.05, rtol=0)


class Assigned(Own):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        with torch.no_grad():
            self.scale[1] = 7.0


def test_deferred_init_replays_assigned_numbers():
    with deferred_init() as tape:
        model = Assigned()
    assert values(model, ["scale"], tape=tape)["scale"][1] == 7.0


def test_deferred_init_names_what_it_cannot_run_again():
    before = torch.empty(3, device="meta")
    with deferred_init() as tape:
        model = Own()
        model.scale = nn.Parameter(torch.empty(3))
        with torch.no_grad():
            model.scale.copy_(before)
    with pytest.raises(InputError, match="not made by a torch op"):
        values(model, ["scale"], tape=tape)
