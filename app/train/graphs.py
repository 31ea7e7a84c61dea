"""The forward and backward pass of a packed row as CUDA graphs: launched whole, not kernel by kernel.

A BERT-base micro-batch is about a thousand kernels, which a host launches no faster than in some 30 ms; on rows of a
few thousand tokens the GPU needs less. All rows of a run have the same shapes, so the kernels are recorded once and
replayed: same kernels, same order, same numbers. What differs from row to row lives in tensors that stay where they
are: the row itself, the seeds of its dropout masks, the share of its loss, the loss scale and the gradients.

With several processes the backward pass is recorded in parts, from the head down to the embeddings. Behind each part
its gradients, which lie side by side in one buffer, set out over the wire while the next part computes. This takes the
place of DDP, whose hooks cannot be replayed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from app.measure.clock import StepClock
from app.train import packed_fused
from app.train.collate import MicroBatch

WARM_UP = 2  #: passes before recording: kernels are compiled, and cuBLAS has its workspaces
PARTS = 3  #: parts that the encoder's backward pass is recorded in, with several processes
ALIGNED = 64  #: gradients begin at a multiple of so many elements in the buffer, so that kernels load them well
COMPRESSED = {"fp16": torch.float16, "bf16": torch.bfloat16}


def usable(bert: nn.Module, example: MicroBatch) -> bool:
    """Whether ``Graphs`` can take over: rows for the hand-written kernels, whose shapes are all the same."""
    return "cu_seqlens" in example.tensors and "lengths" not in example.tensors and packed_fused.unfit(bert) is None


class Graphs:
    """Recorded passes of ``learner`` over rows like ``example``; ``step`` takes the place of forward and backward."""

    def __init__(
        self, learner: Any, accelerator: Any, example: MicroBatch, accumulation: int, compress: str = "no"
    ) -> None:
        """Record. Leaves no gradients, and torch's generators as they were. Raises RuntimeError where CUDA cannot."""
        self.learner, self.accelerator, self.bert = learner, accelerator, learner.model.bert
        self.several, self.compress = accelerator.num_processes > 1, COMPRESSED.get(compress)
        device = accelerator.device
        layers = len(self.bert.encoder.layer)
        #: the parts below the first begin at the hidden states that go into these layers
        self.cuts = sorted({layers * k // PARTS for k in range(PARTS)}, reverse=True) if self.several else []
        self.parts = _parts(learner, self.cuts)
        self.row = example.to(device) | {"seeds": packed_fused.draw_seeds(self.bert).to(device)}
        self.row["cuts"] = dict.fromkeys(self.cuts)
        self.share = torch.zeros((), device=device)
        stream, host, on_gpu = torch.cuda.Stream(device), torch.get_rng_state(), torch.cuda.get_rng_state(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    loss, above = self._loss(), None
                    for part in range(len(self.parts)):
                        above = self._differentiate(loss, part, above, part < len(self.cuts))[1]
            del loss, above
            self._record(stream, accumulation)
        finally:
            torch.cuda.current_stream(device).wait_stream(stream)
            torch.set_rng_state(host)
            torch.cuda.set_rng_state(on_gpu, device)

    def _record(self, stream: Any, accumulation: int) -> None:
        pool = torch.cuda.graph_pool_handle()

        def recording(graph: Any) -> Any:
            # Loader threads may pin memory meanwhile, which only this thread must not do while it records.
            return torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")

        # What the passes leave in the graphs' own memory is overwritten when they are replayed; a sum must outlive that.
        lasting = self.several or accumulation > 1
        self.gradients = _Side([p for part in self.parts for p in part], self.parts) if lasting else None
        self.forward = torch.cuda.CUDAGraph()
        with recording(self.forward):
            loss = self._loss()
        #: by whether it is the first micro-batch of an update: a graph for each part
        self.backward: dict[bool, list[Any]] = {}
        self.owned: list[tuple[Any, Tensor]] = []  # parameters and their gradients
        variants = [True, False] if accumulation > 1 else [True]
        for first in variants:
            above, seen = None, set[Any]()
            self.backward[first] = []
            for part, parameters in enumerate(self.parts):
                graph = torch.cuda.CUDAGraph()
                with recording(graph):
                    keep = first is not variants[-1] or part < len(self.cuts)
                    found, above = self._differentiate(loss, part, above, keep)
                    if self.gradients:
                        self.gradients.take(parameters, found, seen if first else None)
                    else:
                        self.owned = list(zip(parameters, found, strict=True))
                self.backward[first].append(graph)
        if self.gradients:
            self.owned = list(self.gradients.views.items())
        self.loss = loss.detach()
        self.row["cuts"] = dict.fromkeys(self.cuts)

    def share_weights(self) -> None:
        """With several processes, give the first one's weights to all, as DDP does; every process must call it."""
        if self.gradients and self.several:
            self.gradients.spread()

    def _loss(self) -> Tensor:
        with self.accelerator.autocast():
            return self.learner(self.row)

    def _differentiate(self, loss: Tensor, part: int, above: Tensor | None, keep: bool) -> tuple[list[Tensor], Any]:
        """The gradients of a part's parameters, and of the hidden states that go into it."""
        if part == 0:
            scaler, shared = self.accelerator.scaler, loss * self.share
            of, given = (scaler.scale(shared) if scaler else shared), None
        else:
            of, given = self.row["cuts"][self.cuts[part - 1]][0], above
        below = [self.row["cuts"][self.cuts[part]][1]] if part < len(self.cuts) else []
        found = torch.autograd.grad(of, [*self.parts[part], *below], given, retain_graph=keep)
        return list(found[: len(self.parts[part])]), found[-1] if below else None

    def step(self, micro: MicroBatch, share: Any, first: bool, last: bool, clock: StepClock) -> Tensor:
        """The summed loss of ``micro``. Its gradients, times ``share``, are set, or added unless it is the ``first`` of its
        update, and with the ``last`` summed over all processes."""
        with clock.part("copy"):
            for name, value in micro.tensors.items():
                if isinstance(value, Tensor):
                    self.row[name].copy_(value, non_blocking=True)
            self.row["seeds"].copy_(packed_fused.draw_seeds(self.bert), non_blocking=True)
            self.share.fill_(share)
        with clock.part("forward"):
            self.forward.replay()
        with clock.part("backward"):
            for part, graph in enumerate(self.backward[first]):
                graph.replay()
                if self.gradients and self.several and last:
                    self.gradients.send(part, self.compress)
        if self.gradients and self.several and last:
            with clock.part("communication"):
                self.gradients.arrive()
        for parameter, gradient in self.owned:
            parameter.grad = gradient
        return self.loss.clone()


def _parts(learner: nn.Module, cuts: list[int]) -> list[list[Any]]:
    """The trained parameters by the part of the backward pass that computes their gradients; shared ones are in two."""
    parts: list[list[Any]] = [[] for _ in range(len(cuts) + 1)]
    for name, parameter in learner.named_parameters(remove_duplicate=False):
        place = 0
        if cuts and ".embeddings." in name:
            place = len(cuts)
        elif cuts and ".encoder.layer." in name:
            layer = int(name.split(".encoder.layer.")[1].split(".")[0])
            place = next(k for k, cut in enumerate(cuts) if layer >= cut)
        if parameter.requires_grad and not any(parameter is p for p in parts[place]):
            parts[place].append(parameter)
    return parts


class _Side:
    """Gradients side by side in one buffer, in the order in which a backward pass completes them."""

    def __init__(self, parameters: list[Any], parts: list[list[Any]]) -> None:
        # a shared one is complete with the last part that it is in
        ends = {p: part for part, members in enumerate(parts) for p in members}
        ordered = sorted(dict.fromkeys(parameters), key=lambda p: ends[p])
        sizes = [-(-p.numel() // ALIGNED) * ALIGNED for p in ordered]
        self.buffer = torch.zeros(sum(sizes), dtype=ordered[0].dtype, device=ordered[0].device)
        self.views: dict[Any, Tensor] = {}
        self.buckets: list[Tensor] = []
        begin, at = 0, 0
        for place, (parameter, size) in enumerate(zip(ordered, sizes, strict=True)):
            self.views[parameter] = self.buffer[at : at + parameter.numel()].view_as(parameter)
            at += size
            if place + 1 == len(ordered) or ends[ordered[place + 1]] != ends[parameter]:
                self.buckets.append(self.buffer[begin:at])
                begin = at
        self.sent: list[tuple[Any, Tensor, Tensor]] = []

    @torch.no_grad()
    def spread(self) -> None:
        """Put the first process's weights into the parameters of all, through the buffer."""
        for parameter, view in self.views.items():
            view.copy_(parameter)
        torch.distributed.broadcast(self.buffer, 0)
        for parameter, view in self.views.items():
            parameter.copy_(view)

    def take(self, parameters: list[Any], found: list[Tensor], seen: set[Any] | None) -> None:
        """Write gradients that are the first of their parameter in this update, by ``seen``; add all others, and all if it is None."""
        fresh = [k for k, p in enumerate(parameters) if seen is not None and p not in seen]
        others = [k for k in range(len(parameters)) if k not in fresh]
        for how, chosen in ((torch._foreach_copy_, fresh), (torch._foreach_add_, others)):
            if chosen:
                how([self.views[parameters[k]] for k in chosen], [found[k] for k in chosen])
        if seen is not None:
            seen.update(parameters)

    def send(self, part: int, compress: torch.dtype | None) -> None:
        """Begin to sum a part's gradients over all processes."""
        bucket = self.buckets[part]
        through = bucket.to(compress) if compress else bucket
        self.sent.append((torch.distributed.all_reduce(through, async_op=True), through, bucket))

    def arrive(self) -> None:
        """Have the GPU wait for what was sent."""
        for work, through, bucket in self.sent:
            work.wait()
            if through is not bucket:
                bucket.copy_(through)
        self.sent = []
