"""Calls that a model makes in threads of its own are not calls of other models."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.nn.parallel.replicate import _replicatable_module

from halfstep.torch._within import Within
from tests.torch.test_looking import backward, batch, looking, model_of

__all__ = ["looking"]


class Parallel(nn.Module):
    """Runs each half of its numbers in a thread of its own."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.last = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(16, 2)

    def forward(self, inputs):
        halves = inputs.split(4, dim=1)
        with ThreadPoolExecutor(2) as pool:
            made = list(pool.map(lambda part, half: part(half), self.parts, halves))
        return self.last(torch.cat(made, dim=1))

    @property
    def parts(self):
        return self.left, self.right


def test_parts_that_run_in_threads_belong_to_the_model(looking):
    model = model_of(Parallel)
    backward(model)
    assert [call.model for call in looking._calls] == [model]
    seen = looking.ranges(1.0).ranges
    assert {"left", "right", "last"} <= set(seen.modules)


def test_another_model_in_another_thread_is_one_of_its_own(looking):
    model, other = model_of(), nn.Linear(8, 2)

    class Calling(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, inputs):
            with ThreadPoolExecutor(1) as pool:
                return self.inner(inputs) + pool.submit(other, inputs).result()

    calling = Calling()
    calling(batch()[0]).sum().backward()
    assert [call.model for call in looking._calls] == [other, calling]


def test_copies_that_share_the_work_are_no_models_of_their_own():
    model = nn.Sequential(nn.Linear(2, 2))
    assert _replicatable_module(model)
    copied = model._replicate_for_data_parallel()
    assert Within().holds(copied)
    assert not Within().holds(model)


def test_calls_come_in_while_a_step_is_looked_at(looking):
    model, other = model_of(), nn.Linear(8, 2)
    backward(model)
    calls = looking._calls
    for _ in range(3):
        other(batch()[0])
    for _ in looking._models(1.0):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(other, batch()[0]).result()
    assert len(calls) == 6
