"""The reference with every option, compared to a naive formula and its autograd; the keep mask compared to Philox in Python integers."""

from __future__ import annotations

import math
from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_attention.reference import (
    attention,
    attention_backward_reference,
    attention_reference,
    dropout_keep,
    philox,
    rounded_dropout,
    varlen_backward_reference,
    varlen_reference,
)
from tl_attention.testing.numeric import check_bwd, check_fwd


def naive(
    q, k, v, scale, diagonal, sees, *, softcap=0.0, window=(-1, -1), slopes=None, sink=None, keep=None, p=0.0
):
    """Attention on whole matrices, without subtracting the row max: out and lse.

    diagonal: [seqlen_q], the key a window and ALiBi count from; sees: bool [seqlen_q, seqlen_k], before the window;
    slopes: [.., heads, seqlen_q or 1, 1]; p: the dropout probability, not rounded.
    """
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    away = torch.arange(k.shape[1]) - diagonal[:, None]
    if slopes is not None:
        scores = scores - slopes * away.abs()
    if window[0] >= 0:
        sees = sees & (away >= -window[0])
    if window[1] >= 0:
        sees = sees & (away <= window[1])
    weights = scores.exp() * sees
    total = weights.sum(-1) + (0 if sink is None else sink.exp()[:, None])
    without_keys = total == 0
    total = total.masked_fill(without_keys, 1)
    weights = weights / total[..., None]
    if keep is not None:
        weights = weights * keep / (1 - p)
    return torch.einsum("bhij,bjhd->bihd", weights, v), total.log().masked_fill(without_keys, -math.inf)


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


HEADS = st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)])
BOUND = st.integers(-1, 7)
OPTIONS = st.fixed_dictionaries(
    {
        "causal": st.booleans(),
        "window": st.tuples(BOUND, BOUND),
        "softcap": st.sampled_from([0.0, 0.7, 3.0]),
        "slopes": st.sampled_from(["none", "heads", "batch"]),
        "sink": st.booleans(),
        "dropout_p": st.sampled_from([0.0, 0.01, 0.3]),
        "dlse": st.booleans(),
        "lse_base2": st.booleans(),
    }
)
SEEDS = st.integers(0, 2**32 - 1)


def draw_options(chosen, batch, heads, seqlen_q, seqlen_k):
    """Return the options for the reference and for naive; slopes have the shape for the reference."""
    slopes = {"none": None, "heads": draw(heads).abs(), "batch": draw(batch, heads).abs()}[chosen["slopes"]]
    sink = draw(heads) if chosen["sink"] else None
    keep = None
    if chosen["dropout_p"]:
        seed = torch.randint(2**62, (2,))
        keep = dropout_keep(seed, batch, heads, seqlen_q, seqlen_k, chosen["dropout_p"])
    both = {"softcap": chosen["softcap"], "window": chosen["window"], "sink": sink, "keep": keep}
    theirs = both | {
        "alibi_slopes": slopes,
        "dropout_p": chosen["dropout_p"],
        "lse_base2": chosen["lse_base2"],
    }
    ours = both | {"slopes": slopes, "p": rounded_dropout(chosen["dropout_p"]) / 256}
    if chosen["causal"]:
        ours["window"] = (chosen["window"][0], 0)
    return theirs, ours


def differentiated(inputs, dout, dlse, lse_base2, compute):
    """Return out, lse and the gradients of compute(*inputs); inputs may be None."""
    inputs = [None if x is None else x.clone().requires_grad_() for x in inputs]
    out, lse = compute(*inputs)
    lse = lse / math.log(2) if lse_base2 else lse
    total = (out * dout).sum()
    if dlse is not None:
        total = total + (lse * dlse).masked_fill(lse == -math.inf, 0).sum()
    given = [x for x in inputs if x is not None]
    grads = torch.autograd.grad(total, given, allow_unused=True)
    grads = tuple(torch.zeros_like(x) if grad is None else grad for x, grad in zip(given, grads, strict=True))
    return out.detach(), lse.detach(), grads


@given(
    batch=st.integers(1, 2),
    heads=HEADS,
    seqlens=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    widths=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    chosen=OPTIONS,
    max_scores=st.sampled_from([1, 30, 2**26]),
    seed=SEEDS,
)
@settings(max_examples=150)
def test_options_match_autograd_of_the_naive_formula(batch, heads, seqlens, widths, chosen, max_scores, seed):
    torch.manual_seed(seed)
    (heads_q, heads_kv), (seqlen_q, seqlen_k), (width, width_v) = heads, seqlens, widths
    q, dout = draw(batch, seqlen_q, heads_q, width), draw(batch, seqlen_q, heads_q, width_v)
    k, v = draw(batch, seqlen_k, heads_kv, width), draw(batch, seqlen_k, heads_kv, width_v)
    dlse = draw(batch, heads_q, seqlen_q) if chosen["dlse"] else None
    theirs, ours = draw_options(chosen, batch, heads_q, seqlen_q, seqlen_k)
    if ours["slopes"] is not None:
        ours["slopes"] = ours["slopes"][..., None, None]
    diagonal = torch.arange(seqlen_q) + seqlen_k - seqlen_q
    all_keys = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)

    def compute(q, k, v, sink):
        return naive(q, k, v, 0.8, diagonal, all_keys, **ours | {"sink": sink})

    *expected, grads = differentiated((q, k, v, ours["sink"]), dout, dlse, chosen["lse_base2"], compute)
    how = (0.8, chosen["causal"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MAX_SCORES", max_scores)
        actual = attention_reference(q, k, v, *how, dtype=torch.float64, **theirs)
        torch.testing.assert_close(actual, tuple(expected))
        actual = attention_backward_reference(dout, q, k, v, *how, dtype=torch.float64, dlse=dlse, **theirs)
        torch.testing.assert_close(actual, grads)


def starts(lengths):
    """Return cu_seqlens, int32 [batch + 1]."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@given(
    heads=HEADS,
    lengths=st.lists(st.tuples(*[st.integers(0, 5)] * 4), min_size=0, max_size=4),
    used=st.tuples(st.booleans(), st.booleans()),
    chosen=OPTIONS,
    seed=SEEDS,
)
@settings(max_examples=100)
def test_varlen_matches_autograd_of_the_naive_formula_on_one_sequence(heads, lengths, used, chosen, seed):
    """Lengths are (queries, keys, queries after seqused, keys after seqused); rows outside all sequences hold NaN."""
    torch.manual_seed(seed)
    heads_q, heads_kv = heads
    used_q, used_k = ([x[of] if used[of] else x[of] + x[of + 2] for x in lengths] for of in (0, 1))
    cu_q, cu_k = starts([x[0] + x[2] for x in lengths]), starts([x[1] + x[3] for x in lengths])
    total_q, total_k, tail = int(cu_q[-1]), int(cu_k[-1]), 2
    q, dout, dlse = (
        draw(total_q + tail, heads_q, 3),
        draw(total_q + tail, heads_q, 4),
        draw(heads_q, total_q + tail),
    )
    k, v = draw(total_k + tail, heads_kv, 3), draw(total_k + tail, heads_kv, 4)
    theirs, ours = draw_options(chosen, len(lengths), heads_q, 10, 10)

    # One sequence with all rows, in which a query sees the keys of its own sequence
    diagonal = torch.zeros(len(q), dtype=torch.long)
    sees = torch.zeros(len(q), len(k), dtype=torch.bool)
    keep, slopes = torch.ones(heads_q, len(q), len(k), dtype=torch.bool), 0 * draw(heads_q, len(q), 1)
    in_q, in_k = torch.zeros(len(q), dtype=torch.bool), torch.zeros(len(k), dtype=torch.bool)
    for i, (seqlen_q, seqlen_k) in enumerate(zip(used_q, used_k, strict=True)):
        rows, keys = (slice(int(cu[i]), int(cu[i]) + n) for cu, n in ((cu_q, seqlen_q), (cu_k, seqlen_k)))
        in_q[rows], in_k[keys], sees[rows, keys] = True, True, True
        diagonal[rows] = torch.arange(seqlen_q) + seqlen_k - seqlen_q + keys.start
        if ours["keep"] is not None:
            keep[:, rows, keys] = ours["keep"][i, :, :seqlen_q, :seqlen_k]
        if ours["slopes"] is not None:
            of_batch = ours["slopes"].expand(len(lengths), heads_q)
            slopes[:, rows] = of_batch[i, :, None, None].expand(-1, seqlen_q, 1)
    ours |= {"keep": keep, "slopes": slopes}

    def compute(q, k, v, sink):
        out, lse = naive(q[None], k[None], v[None], 0.8, diagonal, sees, **ours | {"sink": sink})
        return out[0], lse[0].masked_fill(~in_q, -math.inf)

    dlse = dlse if chosen["dlse"] else None
    *expected, grads = differentiated((q, k, v, ours["sink"]), dout, dlse, chosen["lse_base2"], compute)

    for x in (q, dout, *(() if dlse is None else [dlse.mT])):
        x[~in_q] = math.nan
    k[~in_k], v[~in_k] = math.nan, math.nan
    seqused = {
        name: torch.tensor(n, dtype=torch.int32)
        for name, n, in_use in (("seqused_q", used_q, used[0]), ("seqused_k", used_k, used[1]))
        if in_use
    }
    how = (cu_q, cu_k, 0.8, chosen["causal"])
    actual = varlen_reference(q, k, v, *how, dtype=torch.float64, **seqused, **theirs)
    torch.testing.assert_close(actual, tuple(expected))
    actual = varlen_backward_reference(
        dout, q, k, v, *how, dtype=torch.float64, dlse=dlse, **seqused, **theirs
    )
    torch.testing.assert_close(actual, grads)


def keys_seen(seqlen_q, seqlen_k, causal=False, **options):
    """Keys that contribute to each row: bool [seqlen_q, seqlen_k]."""
    q, k = torch.zeros(1, seqlen_q, 1, 1), torch.zeros(1, seqlen_k, 1, 1)
    out, _ = attention_reference(q, k, torch.eye(seqlen_k)[None, :, None], 1.0, causal, **options)
    return out[0, :, 0] > 0


SEEN = {
    "both-bounds": ((3, 5, False, (1, 1)), [[1, 2, 3], [2, 3, 4], [3, 4]]),
    "left-alone": ((3, 4, False, (0, -1)), [[1, 2, 3], [2, 3], [3]]),
    "right-alone": ((4, 3, False, (-1, 0)), [[], [0], [0, 1], [0, 1, 2]]),
    "causal-has-the-nearer-bound": ((3, 3, True, (1, 5)), [[0], [0, 1], [1, 2]]),
    "more-queries": ((4, 2, False, (1, 1)), [[], [0], [0, 1], [0, 1]]),
    "beyond-every-key": ((2, 3, False, (100, 100)), [[0, 1, 2], [0, 1, 2]]),
    "beyond-int32": ((2, 3, True, (2**40, -1)), [[0, 1], [0, 1, 2]]),
}


@pytest.mark.parametrize(("chosen", "expected"), SEEN.values(), ids=SEEN.keys())
def test_window_bounds_are_inclusive(chosen, expected):
    *sizes, causal, window = chosen
    seen = keys_seen(*sizes, causal, window=window)
    assert [row.nonzero().flatten().tolist() for row in seen] == expected


def grouped(seqlen_q=6, seqlen_k=8):
    """Random q, k, v, dout with 4 query heads and 2 kv heads."""
    return (
        draw(2, seqlen_q, 4, 3),
        draw(2, seqlen_k, 2, 3),
        draw(2, seqlen_k, 2, 5),
        draw(2, seqlen_q, 4, 5),
    )


def exact(*args, **options):
    return attention_reference(*args, dtype=torch.float64, **options)


def exact_backward(*args, **options):
    return attention_backward_reference(*args, dtype=torch.float64, **options)


NOTHING = {
    "wide-window": {"window": (7, 5)},
    "large-softcap": {"softcap": 1e8},
    "flat-slopes": {"alibi_slopes": torch.zeros(4)},
    "sink-of-minus-infinity": {"sink": torch.full((4,), -math.inf)},
    "keep-all": {"keep": torch.ones(2, 4, 6, 8, dtype=torch.bool)},
}


@pytest.mark.parametrize("options", NOTHING.values(), ids=NOTHING.keys())
def test_options_without_effect(options):
    q, k, v, dout = grouped()
    torch.testing.assert_close(exact(q, k, v, **options), exact(q, k, v))
    grads = exact_backward(dout, q, k, v, **options)
    torch.testing.assert_close(grads[:3], exact_backward(dout, q, k, v))
    assert not any(dsink.any() for dsink in grads[3:])


@pytest.mark.parametrize("name", ["k", "v"])
def test_window_masks_non_finite_keys(name):
    q, k, v, dout = grouped(6, 6)
    options = {"window": (1, 1), "sink": draw(4)}
    out, lse = exact(q, k, v, **options)
    dq, *_ = exact_backward(dout, q, k, v, **options)
    {"k": k, "v": v}[name][:, 3] = math.nan  # queries 2, 3 and 4 see it
    far = [0, 1, 5]
    spoilt_out, spoilt_lse = exact(q, k, v, **options)
    torch.testing.assert_close((spoilt_out[:, far], spoilt_lse[..., far]), (out[:, far], lse[..., far]))
    torch.testing.assert_close(exact_backward(dout, q, k, v, **options)[0][:, far], dq[:, far])
    assert spoilt_out[:, 2:5].isnan().all()


@pytest.mark.parametrize("name", ["dout", "q"])
def test_backward_with_a_window_of_a_query_does_not_reach_other_keys(name):
    q, k, v, dout = grouped(6, 6)
    options = {"window": (1, 1), "softcap": 2.0, "alibi_slopes": draw(2, 4).abs()}
    _, *expected = exact_backward(dout, q, k, v, **options)
    {"dout": dout, "q": q}[name][:, 3] = math.nan  # sees keys 2, 3 and 4
    _, dk, dv = exact_backward(dout, q, k, v, **options)
    far = [0, 1, 5]
    torch.testing.assert_close([dk[:, far], dv[:, far]], [x[:, far] for x in expected])
    assert dk[:, 2:5].isnan().any(-1).all() and dv[:, 2:5].isnan().any(-1).all()


def test_sink_of_a_row_without_keys():
    q, k, v, dout = grouped(6, 2)
    sink, dlse = draw(4), draw(2, 4, 6)
    out, lse = exact(q, k, v, 1.0, True, sink=sink)
    assert (out[:, :4] == 0).all() and (out[:, 4:] != 0).all()
    torch.testing.assert_close(lse[..., :4], sink[:, None].expand(2, 4, 4))
    dq, *_, dsink = exact_backward(dout, q, k, v, 1.0, True, sink=sink, dlse=dlse)
    assert (dq[:, :4] == 0).all()
    *_, of_the_others = exact_backward(dout[:, 4:], q[:, 4:], k, v, 1.0, True, sink=sink, dlse=dlse[..., 4:])
    torch.testing.assert_close(dsink, of_the_others + dlse[..., :4].sum((0, 2)))


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_options_empty_tensors(sizes):
    batch, heads, seqlen_q, seqlen_k = sizes
    q, dout, dlse = (
        draw(batch, seqlen_q, heads, 3),
        draw(batch, seqlen_q, heads, 5),
        draw(batch, heads, seqlen_q),
    )
    k, v, sink = draw(batch, seqlen_k, heads, 3), draw(batch, seqlen_k, heads, 5), draw(heads)
    keep = torch.ones(batch, heads, seqlen_q, seqlen_k, dtype=torch.bool)
    options = {"window": (1, 1), "sink": sink, "alibi_slopes": draw(heads), "keep": keep, "dropout_p": 0.1}
    out, lse = exact(q, k, v, 1.0, True, **options)
    assert out.shape == dout.shape and not out.any()
    torch.testing.assert_close(lse, sink[:, None].expand(batch, heads, seqlen_q))
    *grads, dsink = exact_backward(dout, q, k, v, 1.0, True, dlse=dlse, **options)
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)] and not any(x.any() for x in grads)
    torch.testing.assert_close(dsink, dlse.sum((0, 2)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_options_compute_in_the_given_dtype(dtype):
    q, k, v, dout = (x.to(dtype) for x in grouped(20, 30))
    keep = dropout_keep(torch.tensor([1, 2]), 2, 4, 20, 30, 0.2)
    options = {
        "softcap": 3.0,
        "alibi_slopes": torch.rand(4),
        "window": (9, 9),
        "sink": torch.randn(4),
        "keep": keep,
        "dropout_p": 0.2,
    }
    out, lse = attention_reference(q, k, v, dtype=dtype, **options)
    assert out.dtype == dtype and lse.dtype == torch.float32
    actual = (out, lse, *attention_backward_reference(dout, q, k, v, dtype=dtype, **options))
    assert {x.dtype for x in actual[2:]} == {dtype}
    expected = (*exact(q, k, v, **options), *exact_backward(dout, q, k, v, **options))
    errors = [float((x - y).abs().max()) for x, y in zip(actual, expected, strict=True)]
    assert torch.finfo(dtype).eps / 8 < min(errors) and max(errors) < 60 * torch.finfo(dtype).eps


def test_dropout_without_a_mask_is_an_error():
    q, k, v, _ = grouped()
    with pytest.raises(ValueError, match="keep.*dropout_keep"):
        attention_reference(q, k, v, dropout_p=0.1)


def test_dropout_of_everything_is_zero():
    q, k, v, dout = grouped()
    keep = dropout_keep(torch.tensor([1, 2]), 2, 4, 6, 8, 1.0)
    out, lse = exact(q, k, v, keep=keep, dropout_p=1.0)
    assert not keep.any() and not out.any()
    torch.testing.assert_close(lse, exact(q, k, v)[1])
    assert not any(x.any() for x in exact_backward(dout, q, k, v, keep=keep, dropout_p=1.0))


def test_unknown_options_are_errors():
    q, k, v, _ = grouped()
    with pytest.raises(TypeError, match="window_size"):
        attention_reference(q, k, v, window_size=(1, 1))


# Known answers from Random123's kat_vectors: counter, key, output after 10 rounds
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
KNOWN = {
    "zeros": ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "pi": (PI[:4], PI[4:], (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
}


def philox_in_integers(counter, key, rounds):
    """philox in Python integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for i in range(rounds):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        round_key = ((k0 + i * 0x9E3779B9) % 2**32, (k1 + i * 0xBB67AE85) % 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ round_key[0], low1, high0 ^ c3 ^ round_key[1], low0
    return c0, c1, c2, c3


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN.values(), ids=KNOWN.keys())
def test_philox_known_answers(counter, key, expected):
    tensors = [tuple(torch.tensor(x) for x in words) for words in (counter, key)]
    assert tuple(int(x) for x in philox(*tensors, rounds=10)) == expected
    assert philox_in_integers(counter, key, 10) == expected
    assert tuple(int(x) for x in philox(*tensors)) == philox_in_integers(counter, key, 7)


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**33 + 5, -1])
def test_keep_mask_matches_philox(seed):
    batch, heads, seqlen_q, seqlen_k, offset = 2, 2, 70, 45, 2**35 + 2**31 + 7
    keep = dropout_keep(torch.tensor([seed, offset]), batch, heads, seqlen_q, seqlen_k, 0.3)
    assert keep.shape == (batch, heads, seqlen_q, seqlen_k)
    key = (seed % 2**32, (seed >> 32) % 2**32)
    for b, h, r, c in product(range(batch), range(heads), range(0, seqlen_q, 3), range(seqlen_k)):
        row_counter, key_counter = r // 16 * 4 + r // 2 % 4, c // 16 * 4 + c // 4 % 2 * 2
        words = [
            word
            for call in (0, 1)
            for word in philox_in_integers(
                (row_counter, key_counter + call, b * heads + h, offset % 2**32), key, 7
            )
        ]
        bit = 16 * (c // 2 % 2) + 8 * (r % 2) + 4 * (c % 2) + 2 * (r // 8 % 2) + c // 8 % 2
        number = sum((word >> bit & 1) << i for i, word in enumerate(words))
        assert bool(keep[b, h, r, c]) == (number >= 77), (b, h, r, c)


def test_keep_mask_does_not_depend_on_the_lengths():
    state = torch.tensor([3, 4])
    long = dropout_keep(state, 3, 2, 100, 130, 0.5)
    assert torch.equal(dropout_keep(state, 1, 6, 33, 65, 0.5).view(3, 2, 33, 65), long[:, :, :33, :65])
    assert dropout_keep(state, 2, 2, 0, 5, 0.5).shape == (2, 2, 0, 5)


@pytest.mark.parametrize(
    ("p", "threshold"), [(0.0, 0), (1e-9, 1), (0.1, 26), (0.25, 64), (0.5, 128), (0.999, 256), (1.0, 256)]
)
def test_dropout_is_rounded_to_multiples_of_1_256(p, threshold):
    assert rounded_dropout(p) == threshold


@pytest.mark.parametrize("p", [0.0, 0.001, 0.1, 0.17, 0.5, 0.9])
def test_keep_mask_has_the_dropout_rate(p):
    keep = dropout_keep(torch.tensor([11, 0]), 2, 4, 512, 512, p)
    exact_p = rounded_dropout(p) / 256
    of_each = 4 * math.sqrt(exact_p * (1 - exact_p) / 512**2)
    assert (keep.double().mean((2, 3)) - (1 - exact_p)).abs().max() <= of_each
    assert abs(keep.double().mean() - (1 - exact_p)) <= of_each / math.sqrt(8)


def test_keep_masks_are_independent():
    """Masks of two batches, heads, seeds or offsets, or shifted by rows or keys, agree no more often than by chance."""
    masks = torch.cat(
        [
            dropout_keep(torch.tensor(state), 2, 2, 288, 288, 0.5).flatten(0, 1)
            for state in ((0, 0), (0, 1), (1, 0), (2**32, 0))
        ]
    )
    shifted = [masks[0].roll(shift, dim) for dim in (0, 1) for shift in (1, 2, 4, 8, 16, 32)]
    pairs = [*combinations(masks, 2), *((masks[0], x) for x in shifted)]
    agreement = torch.stack([(x == y).double().mean() for x, y in pairs])
    assert (agreement - 0.5).abs().max() < 5 * 0.5 / 288


RULE = {
    "window-sink": {"window": (20, 0), "sink": torch.linspace(-1, 2, 4)},
    "softcap-alibi": {"softcap": 2.0, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]), "causal": True},
    "dropout": {"keep": dropout_keep(torch.tensor([1, 2]), 2, 4, 50, 40, 0.2), "dropout_p": 0.2},
    "varlen": {
        "cu_seqlens_q": starts([30, 0, 60]),
        "cu_seqlens_k": starts([0, 40, 40]),
        "sink": torch.ones(4),
    },
}


@pytest.mark.parametrize("options", RULE.values(), ids=RULE.keys())
def test_error_rule_holds_with_options(options):
    varlen = "cu_seqlens_q" in options
    q, dout = (torch.randn(2, 50, 4, 16).bfloat16() for _ in range(2))
    k, v = (torch.randn(2, 40, 2, 16).bfloat16() for _ in range(2))
    if varlen:
        q, k, v, dout = (x.flatten(0, 1) for x in (q, k, v, dout))
    forward, backward = (
        (varlen_reference, varlen_backward_reference)
        if varlen
        else (attention_reference, attention_backward_reference)
    )
    out, lse = forward(q, k, v, **options)
    grads = [x.to(q.dtype) for x in backward(dout, q, k, v, **options)]
    result = check_fwd(out.bfloat16(), lse, q, k, v, **options)
    assert result.ok, result.text
    result = check_bwd(grads, dout, q, k, v, **options)
    assert result.ok and len(result.ratios) == len(grads), result.text
    for i, name in enumerate(result.ratios):
        wrong = [x.clone() for x in grads]
        wrong[i].flatten()[-1] += wrong[i].abs().max()
        assert check_bwd(wrong, dout, q, k, v, **options).ratios[name] > 1
    if "sink" in options:
        less = {name: x for name, x in options.items() if name != "sink"}
        assert not check_fwd(out.bfloat16(), lse, q, k, v, **less).ok


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_error_rule_requires_exact_zeros_for_queries_without_keys(varlen):
    q, k, dout = torch.randn(1, 9, 2, 4), torch.randn(1, 5, 2, 4), torch.randn(1, 9, 2, 4)
    options = {"window": (-1, 1)}  # queries 3 and on see keys
    backward = attention_backward_reference
    if varlen:
        q, k, dout, backward = q[0], k[0], dout[0], varlen_backward_reference
        options |= {"cu_seqlens_q": starts([9]), "cu_seqlens_k": starts([5])}
    grads = list(backward(dout, q, k, k, **options))
    assert check_bwd(grads, dout, q, k, k, **options).ok
    grads[0].view(9, 2, 4)[2, 1, 3] = 1e-30
    result = check_bwd(grads, dout, q, k, k, **options)
    assert result.ratios["dq"] > 1 and "2, 1, 3]" in result.text


@pytest.mark.gpu
def test_keep_mask_is_the_same_on_a_gpu():
    state = torch.tensor([-12345678901234567, 2**40 + 2**32 - 1])
    expected = dropout_keep(state, 2, 3, 200, 300, 0.3)
    assert torch.equal(dropout_keep(state.cuda(), 2, 3, 200, 300, 0.3).cpu(), expected)


@pytest.mark.gpu
def test_backward_memory_with_options_is_bounded():
    q, k, v, dout = (torch.randn(1, 16384, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    slopes, sink = torch.rand(2, 16, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attention_backward_reference(dout, q, k, v, softcap=20.0, alibi_slopes=slopes, sink=sink)
    assert torch.cuda.max_memory_allocated() - before < 4 * 2**30
