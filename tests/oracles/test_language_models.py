"""The LSTM and the Transformer: the paper's count, references written out, and equivalences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from regimes.base.errors import ConfigError
from regimes.data.models import build_model, lstm
from regimes.data.models.transformer import encode_positions
from regimes.instruments.hessian.differentiable import twice_differentiable

NAMES = ["lstm", "transformer"]
ALL = [*NAMES, "gpt"]
WORDS = 11


def make(name, **choice):
    torch.manual_seed(0)
    chosen = {"width": 8, "depth": 2, **choice}
    return build_model(name, classes=WORDS, sequence=8, **chosen).double().eval()


def tokens(*shape):
    return torch.randint(0, WORDS, shape, generator=torch.Generator().manual_seed(1))


def test_parameter_count():
    def count(name, **keywords):
        with torch.device("meta"):
            return sum(p.numel() for p in build_model(name, **keywords).parameters())

    assert count("lstm", classes=34_069) == 28_949_319  # Table 10
    assert count("lstm", classes=1) == 6_770_400 + 651
    assert count("transformer", classes=10_000) == 3_699_840  # the docstring
    w, depth, words = 64, 3, 17
    formula = words * w + depth * (12 * w * w + 13 * w) + 2 * w
    assert count("transformer", classes=words, width=w, depth=depth) == formula


@pytest.mark.parametrize("name", ALL)
def test_one_embedding_for_both_ends_and_every_parameter_learns(name):
    model = make(name).train()
    logits, hidden = model(tokens(3, 5))
    assert logits.shape == (3, 5, WORDS)
    assert hidden is None or [h.shape for h in hidden] == [(2, 3, 8)] * 2
    logits.square().sum().backward()
    tables = [n for n, p in model.named_parameters() if WORDS in p.shape and p.dim() == 2]
    assert tables == ["embedding.weight"]
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
    absent = ~torch.isin(torch.arange(WORDS), tokens(3, 5))
    assert absent.any()
    assert model.embedding.weight.grad[absent].any(1).all()  # seen by the output end alone


# -- references written out -----------------------------------------------------------------------


def test_the_lstm_equals_its_equations():
    model = make("lstm", depth=1)
    wi, wh, bi, bh = (p.detach() for p in model.lstm.parameters())
    x, e = tokens(2, 6), model.embedding.weight.detach()
    h = c = torch.zeros(2, 8, dtype=torch.float64)
    model.head.bias.data.uniform_()
    for t in range(6):
        i, f, g, o = (e[x[:, t]] @ wi.T + bi + h @ wh.T + bh).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        logits, hidden = model(x[:, : t + 1])
        torch.testing.assert_close(logits[:, -1], h @ e.T + model.head.bias)
        torch.testing.assert_close(hidden, (h[None], c[None]))


def test_the_transformer_equals_its_equations():
    model = make("transformer", width=64, depth=1)  # two heads of 32
    for parameter in model.blocks.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # biases are zero at the start
    block, e, x = model.blocks.layers[0], model.embedding.weight, tokens(2, 6)
    place, rate = torch.arange(6.0)[:, None].double(), torch.arange(32) / 32
    angle = place / 10_000**rate
    y = 8 * e[x] + torch.cat([angle.sin(), angle.cos()], 1)
    attention, a = block.self_attn, block.norm1(y)
    qkv = a @ attention.in_proj_weight.T + attention.in_proj_bias
    q, k, v = (part.unflatten(2, (2, 32)).transpose(1, 2) for part in qkv.chunk(3, 2))
    scores = q @ k.mT / math.sqrt(32)
    scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
    mixed = (scores.softmax(3) @ v).transpose(1, 2).flatten(2)
    y = y + attention.out_proj(mixed)
    y = y + block.linear2(functional.gelu(block.linear1(block.norm2(y))))
    expected = model.blocks.norm(y) @ e.T
    torch.testing.assert_close(model(x)[0], expected)
    with torch.no_grad():  # torch has a path of its own for inference
        torch.testing.assert_close(model(x)[0], expected)


# -- equivalence ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_two_streams_equal_each_alone(name):
    model, x = make(name), tokens(2, 7)
    both, hidden = model(x)
    for stream in range(2):
        alone, state = model(x[stream : stream + 1])
        torch.testing.assert_close(both[stream : stream + 1], alone)
        for whole, part in zip(hidden or (), state or (), strict=True):
            torch.testing.assert_close(whole[:, stream : stream + 1], part)


@given(st.integers(1, 6))
def test_carrying_the_hidden_state_equals_one_long_pass(cut):
    model, x = make("lstm"), tokens(2, 7)
    whole, end = model(x)
    first, hidden = model(x[:, :cut])
    second, last = model(x[:, cut:], hidden)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(last, end)
    assert not torch.allclose(model(x[:, cut:])[0], second)  # the state matters


@pytest.mark.parametrize("name", ALL)
@given(cut=st.integers(1, 6))
def test_later_words_do_not_change_earlier_logits(name, cut):
    model, x = make(name), tokens(2, 7)
    other = x.clone()
    other[:, cut:] = (x[:, cut:] + 1) % WORDS
    before, after = model(x)[0], model(other)[0]
    torch.testing.assert_close(before[:, :cut], after[:, :cut])
    assert not torch.isclose(before[:, cut:], after[:, cut:]).all(2).any()


def test_the_order_of_earlier_words_matters():
    """To one attention layer without positions, the words before are a set."""
    model, x = make("transformer", depth=1), torch.tensor([[1, 2, 3]])
    swapped = torch.tensor([[2, 1, 3]])
    assert not torch.allclose(model(x)[0][:, -1], model(swapped)[0][:, -1])


@pytest.mark.parametrize("name", ALL)
def test_the_second_derivative_in_evaluation_mode(name):
    """A Hessian-vector product against a central difference of the gradient."""
    model, x = make(name), tokens(2, 5)
    parameters = list(model.parameters())
    direction = [torch.randn_like(p) for p in parameters]

    def gradient(**options):
        with twice_differentiable():
            logits = model(x[:, :-1])[0]
        loss = functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
        return torch.autograd.grad(loss, parameters, **options)

    product = torch.autograd.grad(gradient(create_graph=True), parameters, direction)
    step, ends = 1e-6, []
    for sign in (1, -2):  # to + step, then to - step
        for p, d in zip(parameters, direction, strict=True):
            p.data += sign * step * d
        ends.append(gradient())
    for exact, plus, minus in zip(product, *ends, strict=True):
        torch.testing.assert_close(exact, (plus - minus) / (2 * step), rtol=1e-5, atol=1e-7)


# -- what can be chosen ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("depth", [1, 2])
def test_dropout(name, depth):
    x = tokens(2, 6)

    def passes(**choice):
        model = make(name, depth=depth, **choice).train()
        return model(x)[0], model(x)[0]

    assert not torch.equal(*passes())
    assert torch.equal(*passes(dropout=0.0))
    assert {m.p for m in make(name).modules() if isinstance(m, nn.Dropout)} == {
        "lstm": {0.4},
        "transformer": {0.1},
    }[name]
    assert {m.p for m in make(name, dropout=0.3).modules() if isinstance(m, nn.Dropout)} == {0.3}


@pytest.mark.parametrize("name", NAMES)
def test_where_words_and_outputs_are_dropped(name):
    model, x, seen = make(name), tokens(2, 6), []
    model.dropout.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    logits = model(x)[0]
    words = model.embedding(x)
    if name == "lstm":
        torch.testing.assert_close(seen, [words, model.lstm(words)[0]])
        torch.testing.assert_close(model.head(seen[1]), logits)
    else:
        torch.testing.assert_close(seen, [words * math.sqrt(8) + encode_positions(6, words[0])])


def test_positions_in_half_precision_are_those_in_double_rounded_once() -> None:
    exact = encode_positions(600, torch.empty(1, 16, dtype=torch.float64))
    for dtype, error in ((torch.bfloat16, 2**-8), (torch.float16, 2**-10)):
        half = encode_positions(600, torch.empty(1, 16, dtype=dtype))
        assert half.dtype == dtype
        assert (half.double() - exact).abs().max() < error


def test_the_lstm_drops_between_its_layers_as_torchs_own():
    """With its parameters, their names and, on a CPU, its bits; but layer by layer."""
    torch.manual_seed(1)
    theirs = nn.LSTM(8, 8, 3, batch_first=True, dropout=0.4)
    ours = make("lstm", depth=3).lstm.float()
    ours.load_state_dict(theirs.state_dict())
    x, state = torch.randn(5, 7, 8), tuple(torch.randn(2, 3, 5, 8))
    for hidden in (None, state):
        answers = []
        for layers in (theirs, ours.train()):
            torch.manual_seed(2)
            answers.append(layers(x, hidden))
        (found, last), (expected, theirs_last) = answers
        assert torch.equal(found, expected)
        assert all(map(torch.equal, last, theirs_last))
    assert make("lstm", depth=1).lstm.dropout == 0.0


def test_initialisation():
    torch.manual_seed(0)
    lstm, transformer = (build_model(n, classes=500, width=64, depth=2) for n in NAMES)
    assert 0.099 < lstm.embedding.weight.abs().max() <= 0.1
    assert not lstm.head.bias.any()
    assert max(p.abs().max() for p in lstm.lstm.parameters()) <= 64**-0.5
    assert transformer.embedding.weight.std().item() == pytest.approx(1 / 8, rel=0.02)
    weights = [layer.linear1.weight for layer in transformer.blocks.layers]
    assert 0.99 * math.sqrt(6 / 320) < weights[0].abs().max() <= math.sqrt(6 / 320)
    assert not torch.equal(*weights)


@pytest.mark.parametrize("width", [7, 33, 48])
def test_a_width_that_heads_cannot_divide(width):
    with pytest.raises(ConfigError, match=f"width = {width}: expected a multiple of 32, or even"):
        build_model("transformer", classes=3, width=width)


def test_each_layer_of_an_lstm_is_one_piece_for_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the arguments of ``torch._cudnn_rnn_flatten_weight``, for one layer each."""
    given: list[tuple[object, ...]] = []
    monkeypatch.setattr(lstm.cudnn, "is_acceptable", lambda _: True)
    monkeypatch.setattr(lstm.cudnn.rnn, "get_cudnn_mode", lambda mode: mode)
    monkeypatch.setattr(lstm, "flatten_lstm_weights", lambda *args: given.append(args))
    layers = lstm.Layers(3, 5, 2, batch_first=True)
    assert [args[0] for args in given] == [tuple(weights) for weights in layers.all_weights]
    rest = (
        "LSTM",
        5,
        0,
        1,
        True,
        False,
    )  # mode, hidden, projection, layers, batch first, both ways
    assert [args[1:] for args in given] == [(4, size, *rest) for size in (3, 5)]
