"""The two sampling kernels: one program a tile of a row, then one program a row."""

from __future__ import annotations

from torch_paged.ops.argmax import order_key, pack_choice, unpack_index
from torch_paged.ops.sample.parts import (
    exponentials,
    is_kept,
    list_groups,
    listed_sums_above,
    narrow,
    num_kept_ties,
    order_value,
    race_listed,
    sums_above,
)
from torch_paged.ops.triton_compat import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit
def _races_early(top_k, vocab_size, SMALL_K: tl.constexpr):
    """Whether the tile kernel draws for a row; behind a small top-k few tokens need a draw."""
    return (top_k <= 0) | (top_k >= vocab_size) | (top_k > SMALL_K)


@triton.jit
def _sample_tiles_kernel(
    logits_ptr,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    seeds_ptr,
    counters_ptr,
    greedy_words_ptr,
    race_words_ptr,
    tile_max_ptr,
    group_max_ptr,
    group_sum_ptr,
    vocab_size,
    num_tiles,
    num_groups,
    stride_b,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    SMALL_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Summary of one tile: its greedy choice, its race without filters, and its groups.

    tile_max = max logit; greedy_word = its first index; group_max[g] = max logit of group g;
    race_word = max of (w / e, token) and group_sum[g] = sum of w with w = exp(score - tile max),
    e exponential. Only greedy_word is written at temperature 0, and nothing in a padding row.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        group = tile * GROUPS + tl.arange(0, GROUPS)
        token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(
            logits_ptr + row * stride_b + token, mask=token < vocab_size, other=float("-inf")
        ).to(tl.float32)
        tile_row = row * num_tiles + tile
        tl.store(greedy_words_ptr + tile_row, tl.max(pack_choice(order_key(x), token)))

        temperature = tl.load(temperature_ptr + slot).to(tl.float32)
        if temperature > 0:
            group_max = tl.max(x, axis=1)
            tile_max = tl.max(group_max, axis=0)
            tl.store(group_max_ptr + row * num_groups + group, group_max)
            tl.store(tile_max_ptr + tile_row, tile_max)
            top_k = tl.load(top_k_ptr + slot)
            if _races_early(top_k, vocab_size, SMALL_K):
                scale = tl.div_rn(1.0, temperature)
                largest = tl.where(tile_max == float("-inf"), 0.0, tile_max * scale)
                weight = tl.exp(x * scale - largest)
                tl.store(group_sum_ptr + row * num_groups + group, tl.sum(weight, axis=1))
                seed = tl.load(seeds_ptr + slot)
                counter = tl.load(counters_ptr + slot).to(tl.int64)
                race = weight / exponentials(seed, counter, group, GROUPS, GROUP)
                tl.store(race_words_ptr + tile_row, tl.max(pack_choice(order_key(race), token)))


@triton.jit
def _key_below(score, scale, SHIFT: tl.constexpr):
    """A key below that of every token with at least this score, rounding included."""
    slack = 1e-3 + 1e-6 * tl.abs(score)
    return (order_key((score - slack) / scale) >> SHIFT).to(tl.int64) - 1


@triton.jit
def _sample_rows_kernel(
    logits_ptr,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    counters_ptr,
    greedy_words_ptr,
    race_words_ptr,
    tile_max_ptr,
    group_max_ptr,
    group_sum_ptr,
    tile_flags_ptr,
    list_ptr,
    tokens_ptr,
    support_ptr,
    vocab_size,
    num_tiles,
    num_groups,
    stride_b,
    TILES_BLOCK: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LISTED: tl.constexpr,
    SMALL_K: tl.constexpr,
    SHIFT: tl.constexpr,
    HAS_SUPPORT: tl.constexpr,
    PDL: tl.constexpr,
):
    """tokens[b] = argmax over the support of w / e; support[b] = (least, first_tie, top key).

    A key is the logit's bits as an ordered integer, without the SHIFT low bits that its dtype
    leaves 0. The support is {key > least} and, of the tokens with key = least, those from index
    first_tie on; `least` is found by comparing sums over {key > pivot} with what top-k and top-p
    allow, four pivots a pass, over the groups that can still hold it. In a row that is not drawn,
    the first_tie of support is -1.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    chosen = tl.full([], 0, dtype=tl.int64)
    kept_from = tl.full([], 0, dtype=tl.int64)
    kept_tie = tl.full([], -1, dtype=tl.int64)
    kept_top = tl.full([], 0, dtype=tl.int64)
    if slot >= 0:
        row_ptr = logits_ptr + row * stride_b
        group_max_row = group_max_ptr + row * num_groups
        list_row = list_ptr + row * num_groups
        flags_row = tile_flags_ptr + row * num_tiles
        tile = tl.arange(0, TILES_BLOCK)
        in_tiles = tile < num_tiles
        greedy_words = tl.load(
            greedy_words_ptr + row * num_tiles + tile, mask=in_tiles, other=-0x8000000000000000
        )
        greedy_word = tl.max(greedy_words, axis=0)
        chosen = unpack_index(greedy_word)

        temperature = tl.load(temperature_ptr + slot).to(tl.float32)
        scale = tl.div_rn(1.0, temperature)
        top_key = (greedy_word >> 32).to(tl.int32)
        largest = order_value(top_key) * scale
        # A NaN fails both comparisons: such rows, and overflows of tiny temperatures, are greedy.
        if (temperature > 0) & (tl.abs(largest) < float("inf")):
            top_k = tl.load(top_k_ptr + slot)
            top_p = tl.load(top_p_ptr + slot).to(tl.float64)
            min_p = tl.load(min_p_ptr + slot).to(tl.float32)
            cut_mass = (1.0 - top_p).to(tl.float32)
            by_k = (top_k > 0) & (top_k < vocab_size)
            by_p = top_p < 1.0
            early = _races_early(top_k, vocab_size, SMALL_K)
            tile_max = tl.load(
                tile_max_ptr + row * num_tiles + tile, mask=in_tiles, other=float("-inf")
            )

            top = (top_key >> SHIFT).to(tl.int64)
            # Just under the key of -inf: every token is above.
            bottom = tl.full([], -2139095041 >> SHIFT, dtype=tl.int64) - 1
            least = bottom
            first_tie = tl.full([], 0, dtype=tl.int64)
            total = tl.full([], 0.0, dtype=tl.float32)
            lo = bottom
            hi = top

            if by_k | by_p:
                group = tl.arange(0, GROUPS_BLOCK)
                in_groups = group < num_groups
                group_max = tl.load(group_max_row + group, mask=in_groups, other=float("-inf"))
                group_key = order_key(group_max) >> SHIFT
                if by_k:
                    # The k-th largest token is at least the k-th largest of the groups' maxima.
                    limit = top_k.to(tl.float32)
                    ones = tl.where(in_groups, 1.0, 0.0)
                    while hi - lo > 1:
                        counts = sums_above(group_key, ones, lo, hi, GROUPS_BLOCK)
                        lo, hi = narrow(lo, hi, counts < limit)
                    lo = hi - 1
                    hi = top
                else:
                    # The mass above a pivot is at least that of the maxima above it, and at most
                    # that of their whole groups.
                    group_sum = tl.load(
                        group_sum_ptr + row * num_groups + group, mask=in_groups, other=0.0
                    )
                    tile_of_group = tl.load(
                        tile_max_ptr + row * num_tiles + group // GROUPS,
                        mask=in_groups,
                        other=float("-inf"),
                    )
                    group_sum = group_sum * tl.exp(tile_of_group * scale - largest)
                    total = tl.sum(group_sum, axis=0)
                    group_top = tl.exp(group_max * scale - largest)
                    while hi - lo > 1:
                        mass = sums_above(group_key, group_top, lo, hi, GROUPS_BLOCK)
                        lo, hi = narrow(lo, hi, (total - mass) > (cut_mass - 1e-5) * total)
                    maybe = hi - 1
                    lo = maybe
                    hi = top
                    while hi - lo > 1:
                        mass = sums_above(group_key, group_sum, lo, hi, GROUPS_BLOCK)
                        lo, hi = narrow(lo, hi, (total - mass) > (cut_mass + 1e-5) * total)
                    # All tokens under this score weigh less than what top-p cuts off.
                    spread = largest + tl.log(cut_mass / vocab_size)
                    lo = tl.maximum(maybe, _key_below(spread, scale, SHIFT))

                num_listed = list_groups(
                    list_row, group_max_row, flags_row, num_groups, lo + 1, GROUPS, SHIFT, False,
                    LIST_BLOCK,
                )  # fmt: skip
                if by_k:
                    while hi - lo > 1:
                        counts = listed_sums_above(
                            row_ptr, list_row, num_listed, vocab_size, scale, largest, lo, lo, hi,
                            "count", LISTED, GROUP, SHIFT,
                        )  # fmt: skip
                        lo, hi = narrow(lo, hi, counts < top_k.to(tl.float32))
                    least = hi
                    lo = least - 1
                    hi = top
                    if by_p:
                        # All four pivots of (lo - 1, lo + 1) are lo.
                        mass = listed_sums_above(
                            row_ptr, list_row, num_listed, vocab_size, scale, largest, lo,
                            lo - 1, lo + 1, "mass", LISTED, GROUP, SHIFT,
                        )  # fmt: skip
                        total = tl.max(mass, axis=0)
                if by_p:
                    while hi - lo > 1:
                        mass = listed_sums_above(
                            row_ptr, list_row, num_listed, vocab_size, scale, largest, lo, lo, hi,
                            "mass", LISTED, GROUP, SHIFT,
                        )  # fmt: skip
                        lo, hi = narrow(lo, hi, tl.div_rn(total - mass, total) > cut_mass)
                        if num_listed > 2 * LISTED:
                            num_listed = list_groups(
                                list_row, group_max_row, flags_row, num_groups, lo + 1, GROUPS,
                                SHIFT, False, LIST_BLOCK,
                            )  # fmt: skip
                    least = hi
                    # The pivots of (least - 2, least + 1) are least - 1, thrice, and least.
                    counts = listed_sums_above(
                        row_ptr, list_row, num_listed, vocab_size, scale, largest, least,
                        least - 2, least + 1, "count", LISTED, GROUP, SHIFT,
                    )  # fmt: skip
                    num_ties = (tl.max(counts, axis=0) - tl.min(counts, axis=0)).to(tl.int32)
                    if num_ties > 1:
                        mass = listed_sums_above(
                            row_ptr, list_row, num_listed, vocab_size, scale, largest, least,
                            least - 1, least + 1, "mass", LISTED, GROUP, SHIFT,
                        )  # fmt: skip
                        full_key = (least << SHIFT).to(tl.int32)
                        tie = order_value(
                            tl.where(full_key < 0, full_key | ((1 << SHIFT) - 1), full_key)
                        )
                        weight = tl.exp(tie * scale - largest)
                        num_kept = num_kept_ties(
                            num_ties, tl.max(mass, axis=0), weight, total, cut_mass
                        )
                        if num_kept < num_ties:
                            lo = tl.full([], -1, dtype=tl.int64)
                            hi = lo + vocab_size
                            while hi - lo > 1:
                                counts = listed_sums_above(
                                    row_ptr, list_row, num_listed, vocab_size, scale, largest,
                                    least, lo, hi, "index", LISTED, GROUP, SHIFT,
                                )  # fmt: skip
                                lo, hi = narrow(lo, hi, counts < num_kept.to(tl.float32))
                            first_tie = hi

            kept_from = least
            kept_tie = first_tie
            kept_top = top_key.to(tl.int64)

            # A tile's race stands if its winner is in the support; if not, its tokens race again
            # unless even that winner loses to another tile's.
            raced = tile < tl.where(early, num_tiles, 0)
            words = tl.load(race_words_ptr + row * num_tiles + tile, mask=raced, other=0)
            winner = unpack_index(words)
            x = tl.load(row_ptr + winner, mask=raced, other=float("-inf")).to(tl.float32)
            weight = tl.exp(x * scale - largest)
            stands = raced & is_kept(x, winner, weight, least, first_tie, min_p, top, SHIFT)
            race = order_value((words >> 32).to(tl.int32))
            race_key = order_key(race * tl.exp(tile_max * scale - largest))
            packed = (race_key.to(tl.int64) << 32) | (0x7FFFFFFF - winner)
            best = tl.max(tl.where(stands, packed, -1), axis=0)
            again = in_tiles & (stands == 0)
            again = again & ((race_key.to(tl.int64) >= (best >> 32)) | (raced == 0))
            if tl.max(again.to(tl.int32), axis=0) > 0:
                tl.store(flags_row + tile, again.to(tl.int32), mask=in_tiles)
                listed_from = least
                if min_p > 0.0:
                    smallest = tl.minimum(largest + tl.log(min_p), largest)
                    listed_from = tl.maximum(least, _key_below(smallest, scale, SHIFT))
                num_listed = list_groups(
                    list_row, group_max_row, flags_row, num_groups, listed_from, GROUPS, SHIFT,
                    True, LIST_BLOCK,
                )  # fmt: skip
                word = race_listed(
                    row_ptr, list_row, num_listed, vocab_size, scale, largest, least, first_tie,
                    min_p, top, tl.load(seeds_ptr + slot), tl.load(counters_ptr + slot),
                    LISTED, GROUP, SHIFT,
                )  # fmt: skip
                best = tl.maximum(best, word)
            chosen = unpack_index(best)
    tl.store(tokens_ptr + row, chosen)
    if HAS_SUPPORT:
        tl.store(support_ptr + row * 3, kept_from)
        tl.store(support_ptr + row * 3 + 1, kept_tie)
        tl.store(support_ptr + row * 3 + 2, kept_top)
