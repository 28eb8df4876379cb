"""The language model's task: perplexity against closed forms, streams against plain lists, the
loop against a bare torch loop, and the trainer's equivalences on a text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import lstm as config
from corpora import random_walk
from hypothesis import assume, given
from hypothesis import strategies as st
from runs import same_bits, same_text, weights
from torch import nn
from torch.nn import functional

import regimes
from regimes.base.errors import ConfigError, DataError
from regimes.collectives.world import World
from regimes.data.language import NextWord, Streams, TextTask, cut_streams
from regimes.training import build

torch.set_num_threads(1)
TOPK = ("compressor=topk", "levels.low=50", "levels.high=2")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_walk(tmp_path_factory.mktemp("text"))


class Table(nn.Module):
    """Logits of the next word from the last alone; the hidden state counts the windows."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, x: torch.Tensor, hidden: Any = None) -> tuple[torch.Tensor, Any]:
        return self.logits[x], (torch.zeros(1) if hidden is None else hidden[0] + 1,)


def evaluate(task: TextTask, model: nn.Module) -> tuple[float, float]:
    return task.evaluate(model, torch.device("cpu"), torch.float64)


# -- closed form -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_a_uniform_model_has_the_perplexity_of_its_vocabulary(name: str, text: Path) -> None:
    task = TextTask(config(text))
    model = task.build(config(text, f"model.name={name}")).double()
    for parameter in model.parameters():
        parameter.data.zero_()
    assert evaluate(task, model) == pytest.approx((math.log(11), 11.0), rel=1e-12)


def test_perplexity_by_counting_pairs_of_words(text: Path) -> None:
    task = TextTask(config(text))
    ids = task.corpus.test.tolist()
    assert len(ids) == 201  # 10 streams of 20: no token is left over
    pairs, firsts = Counter(pairwise(ids)), Counter(ids[:-1])
    table = torch.full((11, 11), -math.inf, dtype=torch.float64)
    for (a, b), count in pairs.items():
        table[a, b] = math.log(count / firsts[a])
    entropy = -sum(n * math.log(n / firsts[a]) for (a, _), n in pairs.items()) / 200
    found = evaluate(task, Table(table))
    assert found == pytest.approx((entropy, math.exp(entropy)), rel=1e-12)
    assert 2 < found[1] < 4  # two words may follow each, ten an <eos>


@pytest.mark.parametrize(("size", "streams", "targets"), [(201, 10, 200), (58, 10, 50), (7, 6, 6)])
def test_perplexity_word_by_word_with_the_state_carried(
    size: int, streams: int, targets: int, text: Path
) -> None:
    c = config(text, f"data.test_size={size}", "model.dropout=0.5")
    task = TextTask(c)
    torch.manual_seed(1)
    model = task.build(c).double()
    for parameter in model.parameters():
        parameter.data.normal_()
    ids, loss, length = task.corpus.test.tolist(), 0.0, targets // streams
    for s in range(streams):
        state = None
        for t in range(s * length, (s + 1) * length):
            logits, state = model.eval()(torch.tensor([[ids[t]]]), state)
            loss -= logits[0, 0].log_softmax(0)[ids[t + 1]].item()
    expected = loss / targets
    assert evaluate(task, model) == pytest.approx((expected, math.exp(expected)), rel=1e-12)


def test_a_diverged_model_has_an_infinite_perplexity(text: Path) -> None:
    table = torch.zeros(11, 11, dtype=torch.float64)
    table[:, 0] = 1e4
    loss, perplexity = evaluate(TextTask(config(text)), Table(table))
    assert loss > 5000
    assert perplexity == math.inf


# -- streams, against plain lists ------------------------------------------------------------


@given(
    tokens=st.integers(2, 200),
    workers=st.integers(1, 4),
    batch=st.integers(1, 3),
    sequence=st.integers(1, 9),
    drop_last=st.booleans(),
    start=st.integers(0, 3),
)
def test_streams(
    tokens: int, workers: int, batch: int, sequence: int, drop_last: bool, start: int
) -> None:
    length = (tokens - 1) // (workers * batch)
    assume(length >= sequence)
    ids = torch.arange(1000, 1000 + tokens)  # each token tells its place
    streams = Streams(ids, sequence, workers=workers, batch_size=batch, drop_last=drop_last)
    steps = list(streams.epoch(0, range(workers)))
    assert len(steps) == len(streams)
    whole = length - length % sequence if drop_last else length
    for worker in range(workers):
        for row in range(batch):
            first = 1000 + (row * workers + worker) * length
            read = torch.cat([x[worker, row] for x, _ in steps]).tolist()
            asked = torch.cat([y[worker, row] for _, y in steps]).tolist()
            assert read == list(range(first, first + whole))
            assert asked == list(range(first + 1, first + 1 + whole))
    assert all(x.shape[2] == sequence for x, _ in steps[:-1])
    for x, _ in steps:
        union = x.transpose(0, 1).flatten(0, 1)
        assert union.data_ptr() == x.data_ptr()  # a view
        assert union[:, 0].tolist() == sorted(union[:, 0].tolist())  # in the order of the text
    later = list(streams.epoch(5, range(workers), start))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(later, steps[start:], strict=True))


@given(st.integers(2, 300), st.integers(1, 12))
def test_every_token_is_a_target_once(tokens: int, streams: int) -> None:
    assume(streams < tokens)
    x, y = cut_streams(torch.arange(tokens), streams)
    left_over = (tokens - 1) % streams
    assert y.flatten().tolist() == list(range(1, tokens - left_over))
    assert torch.equal(x + 1, y)


def test_hosted_workers_see_their_own_streams() -> None:
    streams = Streams(torch.arange(97), 5, workers=4, batch_size=2)
    for (whole, _), (part, _) in zip(
        streams.epoch(0, range(4)), streams.epoch(0, [2, 3]), strict=True
    ):
        assert torch.equal(whole[2:], part)


def test_rebatched_is_as_made_anew() -> None:
    ids = torch.arange(97)
    other = Streams(ids, 5, workers=4, batch_size=2).rebatched(3, workers=1)
    anew = Streams(ids, 5, workers=1, batch_size=3)
    assert len(other) == len(anew)
    for a, b in zip(other.epoch(0, [0]), anew.epoch(0, [0]), strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])


# -- the loop --------------------------------------------------------------------------------


def test_one_worker_without_compression_is_a_bare_torch_loop(text: Path, tmp_path: Path) -> None:
    """State carried and detached within an epoch, zero at its start; torch's own clipping."""
    c = config(text, "workers=1", "policy=static", "policy.level=dense", "optimizer.clip=0.3")
    regimes.run(c, tmp_path / "run")
    task = TextTask(c)
    model = task.build(c).double()
    sgd = torch.optim.SGD(
        model.parameters(), lr=1.0, momentum=0.9, nesterov=True, weight_decay=1e-4
    )
    rows, norms = task.corpus.train[: 3 * 266 + 1], []
    x, y = rows[:-1].view(3, 266), rows[1:].view(3, 266)
    for epoch in range(3):
        sgd.param_groups[0]["lr"] = [0.5, 1.0, 0.1][epoch]
        hidden = None
        for t in range(0, 266, 10):
            sgd.zero_grad()
            logits, hidden = model(x[:, t : t + 10], hidden)
            hidden = tuple(h.detach() for h in hidden)
            functional.cross_entropy(logits.flatten(0, 1), y[:, t : t + 10].flatten()).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
            sgd.step()
    assert min(norms) < 0.3 < max(norms)  # some are clipped, or the test shows nothing
    for name, tensor in weights(tmp_path / "run").items():  # torch adds 1e-6 to the norm
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_the_union_pass_equals_worker_by_worker(text: Path, tmp_path: Path) -> None:
    c = config(text, "compressor=randomk", "levels.low=30", "levels.high=5")
    union = regimes.run(c, tmp_path / "union")
    apart = regimes.run(replace(c, union_pass=False), tmp_path / "apart")
    assert union.header["world"]["union_pass"]
    assert not apart.header["world"]["union_pass"]
    same_text(tmp_path / "union", tmp_path / "apart")


def test_dropout_goes_worker_by_worker(text: Path) -> None:
    assert build.prepare_run(config(text)).gradients.union
    assert not build.prepare_run(config(text, "model.dropout=0.2")).gradients.union


def test_resumed_equals_uninterrupted(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the middle of an epoch, where a hidden state is being carried, and continued, by
    units of 3 of its 7 steps, from the unit's first step."""
    c = config(text, *TOPK, "unit_steps=3", "model.dropout=0.2", "dtype=float32", epochs=2)
    regimes.run(c, tmp_path / "whole")
    original = Streams.epoch

    def broken(self: Streams, epoch: int, hosted: range, first: int = 0) -> Iterator[Any]:
        now = epoch == 1 and first > 0
        yield from islice(original(self, epoch, hosted, first), 2 if now else None)
        if now:
            raise KeyboardInterrupt

    monkeypatch.setattr(Streams, "epoch", broken)
    with pytest.raises(KeyboardInterrupt):
        regimes.run(c, tmp_path / "broken")
    monkeypatch.undo()
    regimes.run(c, tmp_path / "broken", resume=True)
    same_bits(tmp_path / "whole", tmp_path / "broken")


def test_the_header_says_what_was_read(text: Path, tmp_path: Path) -> None:
    """And noise on updates, which is for any data, makes another run."""
    plain = regimes.run(config(text, epochs=1), tmp_path / "run")
    assert {"train": 800, "test": 201, "words": 11}.items() <= plain.header["data"].items()
    assert plain.header["steps_per_epoch"] == 7
    c = config(text, "deficit={name='gradient-noise', windows=[[0, 1]]}", epochs=1)
    assert regimes.run(c, tmp_path / "noisy").epochs["metric"][0] != plain.epochs["metric"][0]


# -- instruments -----------------------------------------------------------------------------


class Part(World):
    """One of several processes, which meets no other."""

    def __init__(self, rank: int, processes: int) -> None:
        super().__init__(4)
        self.rank, self.processes = rank, processes


def test_a_probe_is_the_same_windows_for_any_number_of_processes(text: Path) -> None:
    task = TextTask(config(text))
    batches = task.batches(config(text), torch.device("cpu"), torch.float64)
    whole = task.probe(batches, Part(0, 1), 8, 2)
    shares = [b for rank in range(2) for b in task.probe(batches, Part(rank, 2), 8, 2)]
    assert [x.shape for x, _ in whole] == [(2, 10)] * 4
    for (x, y), (u, v) in zip(whole, shares, strict=True):
        assert torch.equal(x, u)
        assert torch.equal(y, v)
    train = task.corpus.train
    for i, (x, y) in enumerate(pair for b in whole for pair in zip(*b, strict=True)):
        first = 10 * (i * 79 // 8)  # 79 windows
        assert torch.equal(x, train[first : first + 10])
        assert torch.equal(y, train[first + 1 : first + 11])


def test_samples_are_disjoint_windows_of_the_text(text: Path) -> None:
    task = TextTask(config(text))
    task.corpus = replace(task.corpus, train=torch.arange(800))  # each token tells its place
    batches = task.batches(config(text), torch.device("cpu"), torch.float64)
    drawn = task.samples(batches, 0, 1, 26, 3)
    firsts = [x[0].item() for b in drawn for x in b[0]]
    assert len(set(firsts)) == 78
    assert all(first % 10 == 0 for first in firsts)
    assert all(torch.equal(y, x + 1) for x, y in drawn)
    assert torch.equal(task.samples(batches, 0, 1, 2, 3)[0][0], drawn[0][0])
    assert not torch.equal(task.samples(batches, 0, 2, 2, 3)[0][0], drawn[0][0])


def test_instruments_measure_a_text(text: Path, tmp_path: Path) -> None:
    c = config(text, "model.dropout=0.2", "dtype=float32", *TOPK, epochs=1)
    tables = {
        "curvature": {"images": 8, "batch": 4, "probes": 2, "max_products": 6},
        "noise": {},
        "overlap": {"batches": [3], "count": 2},
    }
    with_all = regimes.run(replace(c, instruments=tables), tmp_path / "all")
    regimes.run(c, tmp_path / "none")
    for name, tensor in weights(tmp_path / "none").items():
        assert torch.equal(tensor, weights(tmp_path / "all")[name]), name
    assert with_all.epochs[["eigenvalue", "noise_scale", "overlap:b3"]].notna().all(axis=None)


# -- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        (["data.path=nowhere"], DataError, "nowhere/wikitext-2 does not exist"),
        (["data.sequence=0"], ConfigError, "data.sequence = 0: expected at least 1"),
        (
            ["data.sequence=67"],
            DataError,
            "have 66 tokens each, fewer than data.sequence = 67: ",
        ),
        (["batch_size=201"], DataError, "too few for one step of 4 workers x 201"),
        (["model.name=vgg7"], ConfigError, "'vgg7' takes images, the data are text"),
        (["data.name=digits", "data.path=none"], ConfigError, "'lstm' takes text, the data are im"),
        *[
            ([f"{field}={value}"], ConfigError, f"{field} = {value.title()}: expected none")
            for field, value in (
                *(("data.augment", "true"), ("data.image_size", "16"), ("data.resize", "16")),
                *(("data.test_share", "0.5"), ("channels_last", "true")),
            )
        ],
        *[
            ([f"deficit={{name='{name}', windows=[[0, 1]]}}"], ConfigError, f"'{name}': expected")
            for name in ("blur", "labels")
        ],
        (["instruments.curvature={images=80,batch=8}"], ConfigError, "at most 79, the training"),
        (["instruments.overlap={batches=[40]}"], ConfigError, "does not hold two batches"),
        (
            ["batch_policy={name='static', level='low'}", "batch_levels={low=3}"],
            ConfigError,
            "cannot change during a run",
        ),
    ],
)
def test_bad_input_is_one_sentence_before_any_work(
    settings: list[str], error: type[Exception], sentence: str, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        regimes.run(config(text, *settings), tmp_path / "run")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "epochs.jsonl").exists()


def test_the_loss_is_the_mean_over_tokens(text: Path) -> None:
    table = torch.randn(11, 11, dtype=torch.float64)
    x, y = torch.tensor([[0, 3, 2]]), torch.tensor([[3, 2, 5]])
    expected = -torch.stack(
        [table[a].log_softmax(0)[b] for a, b in [(0, 3), (3, 2), (2, 5)]]
    ).mean()
    model = Table(table)
    torch.testing.assert_close(NextWord()(model, x, y).detach(), expected)
    _, hidden = NextWord().carry(model, x, y, None)
    _, hidden = NextWord().carry(model, x, y, hidden)
    assert hidden[0].item() == 1  # the state was handed on
