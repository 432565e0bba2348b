"""Gradients touched at the wrong moment: with a region there is none, they are always true."""

import copy

import pytest
import torch
from torch import nn, optim
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from halfstep.torch import prepare

# A scale at which no step is skipped, because loops that skip differ.
FLOAT16 = "mixed_float16, scale=dynamic(init_scale=128.0)"
FLOAT32 = "compute_dtype=float32"
POLICIES = [FLOAT16, "mixed_bfloat16", FLOAT32]
# How far parameters may be from those of the float32 loop, relative to how far they moved.
TOLERANCE = {FLOAT16: 0.02, "mixed_bfloat16": 0.1, FLOAT32: 0.0}


@pytest.fixture(params=POLICIES, ids=["float16", "bfloat16", "float32"])
def policy(request):
    return request.param


def network(outputs=4):
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, outputs))


def batches(count=8):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(10, 6, generator=generator) for _ in range(count)]


def assert_trains_alike(loop, policy):
    """Compares the modules that a loop has trained with and without a region."""
    trained = []
    for enclose in (lambda *them: None, lambda *them: prepare(*them, policy=policy)):
        torch.manual_seed(0)
        trained.append(flat(loop(enclose)))
    plain, region = trained
    torch.manual_seed(0)
    moved = (plain - flat(loop(lambda *them: None, steps=0))).norm()
    assert moved > 0
    assert (plain - region).norm() <= TOLERANCE[policy] * moved


def flat(modules):
    return torch.cat([p.detach().flatten() for module in modules for p in module.parameters()])


def with_clipping(clip):
    def loop(enclose, steps=8):
        model = network()
        optimizer = optim.SGD(model.parameters(), lr=0.01)
        enclose(model, optimizer)
        for batch in batches()[:steps]:
            optimizer.zero_grad()
            (10 * model(batch).square().mean()).backward()
            clip(model)
            optimizer.step()
        return [model]

    return loop


def adaptive(model):
    """Clips each gradient by the norm of its parameter."""
    for parameter in model.parameters():
        limit = 0.01 * parameter.detach().norm().clamp(min=1e-3)
        parameter.grad.mul_((limit / parameter.grad.norm().clamp(min=1e-6)).clamp(max=1.0))


def by_hand(model):
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for parameter in model.parameters():
        parameter.grad /= norm.clamp(min=1.0)


def noisy(model):
    """Clips and adds noise, as for differential privacy."""
    clip_grad_norm_(model.parameters(), 1.0)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.grad += 0.1 * torch.randn(parameter.shape, generator=generator)


CLIPPINGS = {
    "norm": lambda model: clip_grad_norm_(model.parameters(), 1.0),
    "norm, foreach": lambda model: clip_grad_norm_(model.parameters(), 1.0, foreach=True),
    "norm, inf": lambda model: clip_grad_norm_(model.parameters(), 0.5, norm_type=torch.inf),
    "norm of one layer": lambda model: clip_grad_norm_(model[0].parameters(), 1.0),
    "value": lambda model: clip_grad_value_(model.parameters(), 0.01),
    "adaptive": adaptive,
    "by hand": by_hand,
    "noisy": noisy,
}


@pytest.mark.parametrize("clip", CLIPPINGS)
def test_clipping_means_what_it_says(clip, policy):
    """Clipped while scaled, the update shrank by the scale and training crawled."""
    assert_trains_alike(with_clipping(CLIPPINGS[clip]), policy)


def test_a_clipped_step_has_the_length_that_was_asked_for(policy):
    """An update of norm 1 came out as 1.5e-5."""
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    prepare(model, optimizer, policy)
    model(torch.tensor([[3.0, 4.0]])).sum().backward()
    assert clip_grad_norm_(model.parameters(), 1.0).item() == pytest.approx(5.0)
    optimizer.step()
    assert (model.weight - before).norm().item() == pytest.approx(1.0, abs=1e-3)


def test_logged_norms_are_true(policy):
    """Norms in the log were 65536 times too large, and jumped with the scale."""
    norms = []
    for prepared in (False, True):
        torch.manual_seed(0)
        model = network()
        if prepared:
            prepare(model, policy=policy)
        model(batches()[0]).square().mean().backward()
        norms.append(get_total_norm([p.grad for p in model.parameters()]).item())
    assert norms[1] == pytest.approx(norms[0], rel=0.02)


def test_gradients_are_clipped_by_hooks(policy):
    """Hooks that clip element by element saw scaled gradients, and clipped all of them."""

    def loop(enclose, steps=8):
        model = network()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        enclose(model, optimizer)
        for batch in batches()[:steps]:
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
        return [model]

    assert_trains_alike(loop, policy)


@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW])
def test_an_optimizer_for_each_parameter_steps_during_backward(kind, policy):
    """Steps in hooks of the parameters, which free each gradient at once, went without scaling."""

    def loop(enclose, steps=8):
        model = network()
        optimizers = {p: kind([p], lr=0.01) for p in model.parameters()}
        enclose(model, [*optimizers.values()])

        def step(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for batch in batches()[:steps]:
            model(batch).square().mean().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        return [model]

    assert_trains_alike(loop, policy)


class Sharp(optim.Optimizer):
    """Sharpness-aware minimisation as it is usually written: around another optimizer."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def _each(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for p in self._each()]).norm()
        for p in self._each():
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in self._each():
            p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.first_step()
        closure()
        self.second_step()


def sharp(model):
    return Sharp(model.parameters(), optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("form", ["closure", "two steps"])
def test_a_step_in_two_halves(form, policy):
    """Sharpness-aware minimisation was refused, or normalised by a scaled norm."""

    def loop(enclose, steps=8):
        model = network()
        optimizer = sharp(model)
        enclose(model, [optimizer, optimizer.base])
        for batch in batches()[:steps]:

            def closure(batch=batch):
                loss = model(batch).square().mean()
                loss.backward()
                return loss

            closure()
            if form == "closure":
                optimizer.step(closure)
            else:
                optimizer.first_step()
                closure()
                optimizer.second_step()
        return [model]

    assert_trains_alike(loop, policy)


@pytest.mark.parametrize("how", ["by position", "by name"])
@pytest.mark.parametrize(
    "kind",
    [
        lambda them: optim.SGD(them, lr=0.1),
        lambda them: optim.Adam(them, lr=0.01),
        lambda them: optim.LBFGS(them, lr=0.5, max_iter=5),
        lambda them: optim.LBFGS(them, max_iter=5, line_search_fn="strong_wolfe"),
    ],
    ids=["SGD", "Adam", "LBFGS", "LBFGS with a line search"],
)
def test_a_closure_is_taken_in_both_forms(kind, how, policy):
    """By name a closure was refused, by position its gradients were 65536 times too large."""
    model, batch = network(), batches()[0]
    optimizer = kind(model.parameters())
    region = prepare(model, optimizer, policy)

    def closure():
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    first = closure().item()
    for _ in range(20):
        loss = optimizer.step(closure) if how == "by position" else optimizer.step(closure=closure)
    assert loss.item() < 0.5 * first
    assert region.history.skipped == 0


def penalised(penalty):
    def loop(enclose, steps=8):
        model = nn.Sequential(nn.Linear(6, 16), nn.Softplus(), nn.Linear(16, 1))
        optimizer = optim.SGD(model.parameters(), lr=0.01)
        enclose(model, optimizer)
        for batch in batches(steps):
            optimizer.zero_grad()
            penalty(model, batch.requires_grad_()).backward()
            optimizer.step()
        return [model]

    return loop


def of_inputs(model, batch):
    score = model(batch)
    (gradient,) = torch.autograd.grad(score.sum(), batch, create_graph=True)
    return score.mean() + (gradient.norm(dim=1) - 1).square().mean()


def of_parameters(model, batch):
    loss = model(batch).square().mean()
    gradients = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    return loss + 0.1 * sum(gradient.square().sum() for gradient in gradients)


def of_real_images(model, batch):
    """As in StyleGAN: softplus of scores, and half the squared gradient on real images."""
    score = model(batch)
    (gradient,) = torch.autograd.grad(score.sum(), batch, create_graph=True)
    return functional.softplus(-score).mean() + 5.0 * gradient.square().sum(1).mean()


def along_a_path(model, batch):
    """Between two batches, with the score in a graph of its own."""
    share = torch.linspace(0, 1, len(batch))[:, None]
    between = (share * batch + (1 - share) * batch.flip(0)).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(
        model(between), between, torch.ones(len(batch), 1), create_graph=True
    )
    return model(batch).mean() + 10 * (gradient.norm(2, dim=1) - 1).square().mean()


PENALTIES = {
    "of inputs": of_inputs,
    "of parameters": of_parameters,
    "of real images": of_real_images,
    "along a path": along_a_path,
}


@pytest.mark.parametrize("penalty", PENALTIES)
def test_gradient_penalties_need_no_recipe(penalty, policy):
    """The scale had to go in and out around the inner gradient by hand."""
    assert_trains_alike(penalised(PENALTIES[penalty]), policy)


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad])
@pytest.mark.parametrize("clip", [False, True])
def test_fused_optimizers_unscale_nothing_twice(kind, clip, policy):
    """A fused Adam unscaled again what unscale_ had unscaled."""

    def loop(enclose, steps=8):
        model = network()
        optimizer = kind(model.parameters(), lr=0.01, fused=True)
        enclose(model, optimizer)
        for batch in batches()[:steps]:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            if clip:
                clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        return [model]

    assert_trains_alike(loop, policy)


class Overflowing(nn.Module):
    """Its gradients overflow in float16 as long as what enters is larger than about 2**10."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 1, bias=False)
        nn.init.ones_(self.first.weight)
        nn.init.constant_(self.second.weight, 60.0)

    def forward(self, values):
        return self.second(self.first(values) * 1.0)


def each_gradient(change):
    return lambda model: [change(parameter.grad) for parameter in model.parameters()]


TOUCHES = {
    "nothing": lambda model: None,
    "norm": lambda model: clip_grad_norm_(model.parameters(), 1.0),
    "product": each_gradient(lambda gradient: gradient.mul_(2)),
    "value": lambda model: clip_grad_value_(model.parameters(), 1.0),
    "sign": each_gradient(torch.Tensor.sign_),
    "numbers": each_gradient(torch.Tensor.nan_to_num_),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("touch", TOUCHES)
def test_no_step_is_taken_from_an_overflow(touch, fused):
    """A fused Adam stepped on infinite gradients after unscale_, because nobody had looked."""
    model = Overflowing()
    optimizer = optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    region = prepare(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    model(torch.ones(4, 2)).sum().backward()
    assert not all(p.grad.isfinite().all() for p in model.parameters())
    TOUCHES[touch](model)
    optimizer.step()
    assert region.last_step.skipped
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state


def test_no_step_is_taken_from_an_overflow_that_a_hook_clipped():
    """A hook made 1 of an infinite gradient, and the step was taken."""
    model = Overflowing()
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1, 1))
    region = prepare(model, optimizer)
    before = model.first.weight.detach().clone()
    model(torch.ones(4, 2)).sum().backward()
    assert model.first.weight.grad.isfinite().all()
    optimizer.step()
    assert region.last_step.skipped
    assert torch.equal(model.first.weight, before)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_penalty_costs_few_skipped_steps(penalty):
    """Its two passes are one step: what the inner one finds says nothing about the outer one."""
    regions = []
    penalised(PENALTIES[penalty])(lambda *them: regions.append(prepare(*them)), steps=20)
    assert regions[0].history.skipped <= 3
    assert not regions[0].last_step.skipped


@pytest.mark.parametrize("factor", [1.0, 1e3, 1e6, 1e12])
def test_norms_beyond_half_are_finite(factor, policy):
    """The norm of half gradients was infinite, and clipping made zeros of them."""
    model = network()
    plain = copy.deepcopy(model)
    prepare(model, policy=policy)
    for each in (model, plain):
        (factor * each(batches()[0]).square().sum()).backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    norm, expected = (clip_grad_norm_(each.parameters(), 1.0).item() for each in (model, plain))
    assert norm == pytest.approx(expected, rel=0.02)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(parameter.grad, other.grad, atol=0.02)


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam])
def test_accumulated_gradients_are_those_of_the_whole_batch(micro_batches, kind, policy):
    """When to unscale, clip and update while accumulating was a matter of folklore."""

    def loop(enclose, steps=8):
        model = network()
        optimizer = kind(model.parameters(), lr=0.01)
        enclose(model, optimizer)
        for batch in batches()[:steps]:
            optimizer.zero_grad()
            for part in batch.chunk(micro_batches):
                (model(part).square().sum() / batch.numel()).backward()
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        return [model]

    assert_trains_alike(loop, policy)


def test_a_micro_batch_that_overflows_spoils_its_step_alone():
    """The step that holds it is skipped, the next one is right."""
    model = Overflowing()
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    region = prepare(model, optimizer)
    skipped = []
    for _ in range(4):
        optimizer.zero_grad()
        for part in torch.ones(4, 2).split(2):
            (model(part).sum() / 4).backward()
        optimizer.step()
        skipped.append(region.last_step.skipped)
    assert skipped[0]
    assert not skipped[-1]
    plain = Overflowing()
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        each.zero_grad()
        (each(torch.ones(4, 2)).sum() / 4).backward()
    assert torch.allclose(model.first.weight.grad, plain.first.weight.grad, rtol=0.01)


def test_what_is_trained_besides_the_model_is_true_too(policy):
    """Only some parameter groups had been scaled: the others moved 65536 times as fast."""

    def loop(enclose, steps=8):
        backbone, head = network(), nn.Linear(4, 4)
        weights = nn.ParameterList([torch.zeros(()), torch.zeros(())])
        optimizer = optim.SGD(
            [
                {"params": backbone.parameters(), "lr": 0.1},
                {"params": head.parameters(), "lr": 0.05},
                {"params": weights.parameters(), "lr": 0.01},
            ],
            lr=0.1,
        )
        enclose(backbone, optimizer)
        for batch in batches()[:steps]:
            optimizer.zero_grad()
            losses = head(backbone(batch)).square().mean(), backbone(batch).abs().mean()
            # Weighted by uncertainties that are learnt.
            sum(loss * (-w).exp() + w for loss, w in zip(losses, weights, strict=True)).backward()
            optimizer.step()
        return [backbone, head, weights]

    assert_trains_alike(loop, policy)


def test_parameter_groups_that_join_later(policy):
    """Layers are thawed one by one, each with a learning rate of its own."""

    def loop(enclose, steps=8):
        model = network()
        model[0].requires_grad_(False)
        optimizer = optim.SGD(model[2].parameters(), lr=0.1)
        enclose(model, optimizer)
        for number, batch in enumerate(batches()[:steps]):
            if number == 4:
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.02})
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return [model]

    assert_trains_alike(loop, policy)


def test_two_optimizers_of_one_model_skip_by_themselves():
    """One scale and one verdict for all: the healthy one skipped, too."""
    model = network()
    optimizers = [optim.SGD(model[place].parameters(), lr=0.1) for place in (0, 2)]
    region = prepare(model, optimizers)
    model(batches()[0]).square().mean().backward()
    model[0].weight.grad[0, 0] = torch.inf
    before = copy.deepcopy(model.state_dict())
    for optimizer in optimizers:
        optimizer.step()
    after = model.state_dict()
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert not torch.equal(after["2.weight"], before["2.weight"])
    assert region.history.skipped == 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_networks_against_each_other(order, policy):
    """One scaler or two, which one is updated when: for GANs nobody knew."""

    def loop(enclose, steps=8):
        maker, critic = network(6), network(1)
        optimizers = [optim.SGD(each.parameters(), lr=0.05) for each in (maker, critic)]
        for model, optimizer in zip((maker, critic), optimizers, strict=True):
            enclose(model, optimizer)
        for batch in batches()[:steps]:
            for turn in order:
                optimizers[turn].zero_grad()
                made = maker(batch)
                if turn == 0:
                    loss = functional.softplus(-critic(made)).mean()
                else:
                    loss = functional.softplus(critic(made.detach())).mean()
                    loss = loss + functional.softplus(-critic(batch)).mean()
                loss.backward()
                optimizers[turn].step()
        return [maker, critic]

    assert_trains_alike(loop, policy)


def test_an_average_of_weights_moves(policy):
    """An average that was kept in half never changed: 0.999 times a weight is the weight."""
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    prepare(model, optimizer, policy)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    average.update_parameters(model)
    start = flat([average])
    for batch in batches():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)
    assert 0 < (flat([average]) - start).norm() < (flat([model]) - start).norm()
    assert average(batches()[0]).dtype == torch.float32


def test_two_losses_backward_one_after_the_other(policy):
    """A second backward before the step was scaled otherwise than the first."""

    def loop(enclose, steps=8):
        model = network()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        enclose(model, optimizer)
        for batch in batches()[:steps]:
            optimizer.zero_grad()
            output = model(batch)
            (1e-4 * output.square().mean()).backward(retain_graph=True)
            output.abs().mean().backward()
            optimizer.step()
        return [model]

    assert_trains_alike(loop, policy)


def test_gradients_that_are_balanced_by_their_norms(policy):
    """Losses weighted by the norms of their gradients, which a scale had distorted."""

    def loop(enclose, steps=8):
        model = network()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        enclose(model, optimizer)
        for batch in batches()[:steps]:
            optimizer.zero_grad()
            output = model(batch)
            losses = output.square().mean(), 100 * output.abs().mean()
            last = model[2].weight
            norms = [
                torch.autograd.grad(loss, last, retain_graph=True)[0].norm() for loss in losses
            ]
            sum(loss / norm for loss, norm in zip(losses, norms, strict=True)).backward()
            optimizer.step()
        return [model]

    assert_trains_alike(loop, policy)
