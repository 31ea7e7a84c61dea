"""How a backward pass is cut into parts, and the buffer that its gradients lie in. Recording itself needs a GPU: test_gpu.py."""

from __future__ import annotations

import torch
from test_packed import small

from app.train.graphs import ALIGNED, _parts, _Side
from app.train.model import Learner


def test_every_parameter_is_in_the_part_that_computes_its_gradient() -> None:
    learner = Learner(small("mlm", torch.float32), "mlm")
    bert, head = learner.model.bert, learner.model.cls.predictions
    top, middle, bottom = _parts(learner, [1, 0])
    tied = bert.embeddings.word_embeddings.weight
    assert tied is head.decoder.weight
    assert {id(p) for p in top} == {id(p) for p in (*bert.encoder.layer[1].parameters(), *head.parameters())}
    assert {id(p) for p in middle} == {id(p) for p in bert.encoder.layer[0].parameters()}
    assert {id(p) for p in bottom} == {id(p) for p in bert.embeddings.parameters()}
    assert any(tied is p for p in top) and any(tied is p for p in bottom)
    assert len(_parts(learner, [])) == 1
    assert {id(p) for p in _parts(learner, [])[0]} == {id(p) for p in learner.parameters()}


def test_a_frozen_parameter_is_in_none() -> None:
    learner = Learner(small("classify", torch.float32), "classify")
    frozen = learner.model.bert.embeddings.word_embeddings.weight.requires_grad_(False)
    assert not any(frozen is p for part in _parts(learner, [1, 0]) for p in part)


def test_gradients_lie_side_by_side_and_add_up() -> None:
    """Two parts and a parameter that is in both: complete with the second."""
    one, shared, two = (torch.nn.Parameter(torch.zeros(n)) for n in (3, 70, 5))
    parts = [[one, shared], [two, shared]]
    side = _Side([p for part in parts for p in part], parts)
    assert [len(bucket) for bucket in side.buckets] == [ALIGNED, 3 * ALIGNED]
    side.buffer.fill_(9.0)
    seen: set = set()
    side.take(parts[0], [torch.ones(3), torch.full((70,), 2.0)], seen)
    side.take(parts[1], [torch.full((5,), 4.0), torch.full((70,), 3.0)], seen)
    assert [side.views[p].unique().tolist() for p in (one, shared, two)] == [[1.0], [5.0], [4.0]]
    side.take(parts[0], [torch.ones(3), torch.full((70,), 2.0)], None)
    side.take(parts[1], [torch.full((5,), 4.0), torch.full((70,), 3.0)], None)
    assert [side.views[p].unique().tolist() for p in (one, shared, two)] == [[2.0], [10.0], [8.0]]
    assert side.views[shared].data_ptr() in range(side.buckets[1].data_ptr(), side.buckets[1].data_ptr() + 4 * 192)
