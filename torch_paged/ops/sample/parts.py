"""Device functions of the sampling kernels."""

from __future__ import annotations

from torch_paged.ops.argmax import order_key, pack_choice
from torch_paged.ops.triton_compat import tl, triton


@triton.jit
def order_value(key):
    """Inverse of `order_key`, as fp32."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def exponentials(seed, counter, group, NUM_GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Exp(1) numbers [NUM_GROUPS, GROUP] of the tokens of each group of GROUP tokens.

    Token i takes word ``i % 4`` of the Philox block with key `seed` and counter
    ``(i // 4, counter low, counter high, 0)``.
    """
    block = group[:, None] * (GROUP // 4) + tl.arange(0, GROUP // 4)[None, :]
    c0 = block.to(tl.uint32)
    zero = tl.zeros([NUM_GROUPS, GROUP // 4], dtype=tl.uint32)
    c1 = zero + (counter & 0xFFFFFFFF).to(tl.uint32)
    c2 = zero + ((counter >> 32) & 0xFFFFFFFF).to(tl.uint32)
    r0, r1, r2, r3 = tl.philox(seed, c0, c1, c2, zero)
    words = tl.join(tl.join(r0, r2), tl.join(r1, r3))  # last two dims: (r0, r1), (r2, r3)
    bits = tl.reshape(words, [NUM_GROUPS, GROUP]).to(tl.float32)
    u = tl.minimum((bits + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # -log(1 - u); the series keeps the digits of a small u, which decide between many tokens.
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    return tl.where(u < 0.015625, series, -tl.log(1.0 - u))


@triton.jit
def _pivot(lo, hi, j):
    """The j-th of four pivots, j = 0..3, strictly between lo and hi; needs hi - lo >= 2."""
    return tl.maximum(lo + (hi - lo) * (j + 1) // 5, lo + 1)


@triton.jit
def sums_above(key, weight, lo, hi, SIZE: tl.constexpr):
    """Return [4]: the sum of weight where key > pivot, for the four pivots of (lo, hi)."""
    p0 = _pivot(lo, hi, 0).to(tl.int32)
    p1 = _pivot(lo, hi, 1).to(tl.int32)
    p2 = _pivot(lo, hi, 2).to(tl.int32)
    p3 = _pivot(lo, hi, 3).to(tl.int32)
    w0 = tl.where(key > p0, weight, 0.0)
    w1 = tl.where(key > p1, weight, 0.0)
    w2 = tl.where(key > p2, weight, 0.0)
    w3 = tl.where(key > p3, weight, 0.0)
    # One reduction carries all four: its cost is the barrier, not the arithmetic.
    joined = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.sum(tl.reshape(joined, [SIZE, 4]), axis=0)


@triton.jit
def narrow(lo, hi, enough):
    """Return the part (lo, hi] that holds the least pivot with `enough`, true from there up.

    `enough` is false at lo and true at hi.
    """
    pivot = _pivot(lo, hi, tl.arange(0, 4).to(tl.int64))
    new_lo = tl.max(tl.where(enough, lo, pivot), axis=0)
    new_hi = tl.min(tl.where(enough, pivot, hi), axis=0)
    return new_lo, new_hi


@triton.jit
def list_groups(
    list_ptr,
    group_max_ptr,
    tile_flags_ptr,
    num_groups,
    least_key,
    GROUPS_PER_TILE: tl.constexpr,
    SHIFT: tl.constexpr,
    USE_FLAGS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List in order the groups whose largest key is >= least_key; return how many.

    With USE_FLAGS, only groups of tiles whose flag is set.
    """
    # The list may still be read, and flags were just written, by other threads.
    tl.debug_barrier()
    num_listed = 0
    for start in range(0, num_groups, BLOCK):
        group = start + tl.arange(0, BLOCK)
        in_row = group < num_groups
        largest = tl.load(group_max_ptr + group, mask=in_row, other=float("-inf"))
        listed = in_row & ((order_key(largest) >> SHIFT).to(tl.int64) >= least_key)
        if USE_FLAGS:
            flag = tl.load(tile_flags_ptr + group // GROUPS_PER_TILE, mask=in_row, other=0)
            listed = listed & (flag != 0)
        place = num_listed + tl.cumsum(listed.to(tl.int32), axis=0) - 1
        tl.store(list_ptr + place, group, mask=listed)
        num_listed += tl.sum(listed.to(tl.int32), axis=0)
    tl.debug_barrier()
    return num_listed


@triton.jit
def load_groups(
    row_ptr,
    list_ptr,
    start,
    num_listed,
    vocab_size,
    LISTED: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return (group [LISTED], token [LISTED, GROUP], logit) of the listed groups from `start`."""
    i = start + tl.arange(0, LISTED)
    group = tl.load(list_ptr + i, mask=i < num_listed, other=0)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    in_row = (i < num_listed)[:, None] & (token < vocab_size)
    x = tl.load(row_ptr + token, mask=in_row, other=float("-inf")).to(tl.float32)
    return group, token, x


@triton.jit
def listed_sums_above(
    row_ptr,
    list_ptr,
    num_listed,
    vocab_size,
    scale,
    largest_score,
    tie_key,
    lo,
    hi,
    MODE: tl.constexpr,
    LISTED: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """`sums_above` over the tokens of the listed groups.

    MODE "count": key of the logit, weight 1. "mass": the same key, weight exp(score - largest).
    "index": the token's index where its key is tie_key (-1 elsewhere), weight 1.
    """
    SIZE: tl.constexpr = LISTED * GROUP
    sums = tl.zeros([4], dtype=tl.float32)
    for start in range(0, num_listed, LISTED):
        _, token, x = load_groups(row_ptr, list_ptr, start, num_listed, vocab_size, LISTED, GROUP)
        key = order_key(x) >> SHIFT
        weight = tl.full([LISTED, GROUP], 1.0, dtype=tl.float32)
        if MODE == "mass":
            weight = tl.exp(x * scale - largest_score)
        if MODE == "index":
            key = tl.where(key.to(tl.int64) == tie_key, token, -1)
        sums += sums_above(tl.reshape(key, [SIZE]), tl.reshape(weight, [SIZE]), lo, hi, SIZE)
    return sums


@triton.jit
def num_kept_ties(num_ties, mass_above, weight, total, cut_mass):
    """How many of equal tokens top-p keeps: the j-th from the last index, j = 0 always, while

    ``(total - (mass_above + j * weight)) / total > cut_mass``.
    """
    lo = num_ties * 0 + 1
    hi = num_ties
    while lo < hi:
        middle = (lo + hi + 1) // 2
        mass = mass_above + (middle - 1).to(tl.float32) * weight
        kept = tl.div_rn(total - mass, total) > cut_mass
        lo = tl.where(kept, middle, lo)
        hi = tl.where(kept, hi, middle - 1)
    return lo


@triton.jit
def is_kept(x, token, weight, least, first_tie, min_p, top, SHIFT: tl.constexpr):
    """Whether tokens are in the support; the largest logit stays whatever min_p is."""
    key = (order_key(x) >> SHIFT).to(tl.int64)
    kept = (key > least) | ((key == least) & (token >= first_tie))
    return kept & ((weight >= min_p) | (key == top))


@triton.jit
def race_listed(
    row_ptr,
    list_ptr,
    num_listed,
    vocab_size,
    scale,
    largest_score,
    least,
    first_tie,
    min_p,
    top,
    seed,
    counter,
    LISTED: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """The packed choice (weight / exponential, token) over kept tokens of the listed groups."""
    best = tl.full([], -1, dtype=tl.int64)
    for start in range(0, num_listed, LISTED):
        group, token, x = load_groups(
            row_ptr, list_ptr, start, num_listed, vocab_size, LISTED, GROUP
        )
        weight = tl.exp(x * scale - largest_score)
        kept = is_kept(x, token, weight, least, first_tie, min_p, top, SHIFT)
        race = weight / exponentials(seed, counter.to(tl.int64), group, LISTED, GROUP)
        # Lanes past the list and past the row hold -inf and lose to the kept largest logit.
        word = pack_choice(order_key(tl.where(kept, race, -1.0)), token)
        best = tl.maximum(best, tl.max(word))
    return best
