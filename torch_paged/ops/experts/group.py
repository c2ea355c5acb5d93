"""Groups the (token, expert) pairs of a step by expert, in tiles of at most TOKENS.

A pair is numbered token * top_k + slot. The result is one int32 tensor: of each tile its expert
(-1 for none), its first position in the order and its number of pairs, each [max_tiles]; then the
order of the pairs [num_pairs], by expert, within an expert by number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_paged.ops.triton_compat import gdc_launch_dependents, gdc_wait, tl, triton, use_pdl

# Every pair is compared with every other; past this many, sorting is quicker.
MAX_KERNEL_PAIRS = 1024

_CHUNK = 32
_MINE = 64  # pairs whose places one program finds


class Groups(NamedTuple):
    """Tiles of pairs of one expert.

    Attributes:
        tiles: int32 [3, max_tiles]: expert or -1, first position in `order`, number of pairs.
        order: int32 [num_pairs].
    """

    tiles: Tensor
    order: Tensor


def max_tiles(num_pairs: int, num_experts: int, tokens: int) -> int:
    """Return how many tiles any choice of experts can need: each has one that is not full."""
    return min(num_pairs, num_experts + num_pairs // tokens)


@triton.jit(do_not_specialize_on_alignment=["num_pairs", "num_tiles"])
def _group_pairs_kernel(
    ids_ptr,
    tiles_ptr,
    order_ptr,
    num_pairs,
    num_tiles,
    PAIRS: tl.constexpr,
    MINE: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    TILES_EACH: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """position[p] = #{q: id[q] < id[p]} + #{q < p: id[q] = id[p]}; order[position[p]] = p.

    A program finds the positions of MINE pairs, and the first one the tiles besides.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(0)
    pair = block * MINE + tl.arange(0, MINE)
    is_pair = pair < num_pairs
    mine = tl.load(ids_ptr + pair, mask=is_pair, other=EXPERTS)
    position = tl.zeros([MINE], tl.int32)
    for start in range(0, PAIRS, CHUNK):
        other = start + tl.arange(0, CHUNK)
        theirs = tl.load(ids_ptr + other, mask=other < num_pairs, other=EXPERTS)[None, :]
        earlier = (theirs == mine[:, None]) & (other[None, :] < pair[:, None])
        position += tl.sum(((theirs < mine[:, None]) | earlier).to(tl.int32), axis=1)
    tl.store(order_ptr + position, pair, mask=is_pair)
    if block > 0:
        return

    expert = tl.arange(0, EXPERTS)
    count = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, PAIRS, CHUNK):
        other = start + tl.arange(0, CHUNK)
        theirs = tl.load(ids_ptr + other, mask=other < num_pairs, other=EXPERTS)[None, :]
        count += tl.sum((theirs == expert[:, None]).to(tl.int32), axis=1)
    first = tl.cumsum(count, axis=0) - count
    tiles = (count + TOKENS - 1) // TOKENS
    tile = tl.cumsum(tiles, axis=0) - tiles
    r_tile = tl.arange(0, TILES)
    unused = (r_tile >= tl.sum(tiles, axis=0)) & (r_tile < num_tiles)
    tl.store(tiles_ptr + r_tile, tl.full([TILES], -1, tl.int32), mask=unused)
    for index in range(TILES_EACH):
        here = index < tiles
        tl.store(tiles_ptr + tile + index, expert, mask=here)
        tl.store(tiles_ptr + num_tiles + tile + index, first + index * TOKENS, mask=here)
        size = tl.minimum(count - index * TOKENS, TOKENS)
        tl.store(tiles_ptr + 2 * num_tiles + tile + index, size, mask=here)


def group_pairs(ids: Tensor, num_experts: int, tokens: int) -> Groups:
    """Group ids [num_tokens, top_k] int32; nothing is read back to the host."""
    num_tokens, num_pairs = ids.shape[0], ids.numel()
    num_tiles = max_tiles(num_pairs, num_experts, tokens)
    if num_pairs > MAX_KERNEL_PAIRS:
        return _sort_pairs(ids.view(-1), num_experts, tokens, num_tiles)
    made = torch.empty(3 * num_tiles + num_pairs, dtype=torch.int32, device=ids.device)
    groups = Groups(made[: 3 * num_tiles].view(3, num_tiles), made[3 * num_tiles :])
    pairs = triton.next_power_of_2(num_pairs)
    pdl = use_pdl(ids)
    mine = min(pairs, _MINE)
    _group_pairs_kernel[(triton.cdiv(num_pairs, mine),)](
        ids,
        groups.tiles,
        groups.order,
        num_pairs,
        num_tiles,
        PAIRS=pairs,
        MINE=mine,
        EXPERTS=triton.next_power_of_2(num_experts),
        TILES=triton.next_power_of_2(num_tiles),
        TOKENS=tokens,
        # A token chooses an expert once.
        TILES_EACH=triton.cdiv(num_tokens, tokens),
        CHUNK=min(pairs, _CHUNK),
        PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )
    return groups


def _sort_pairs(ids: Tensor, num_experts: int, tokens: int, num_tiles: int) -> Groups:
    """The same for many pairs, by torch's sort, which is stable."""
    ordered, order = ids.sort(stable=True)
    experts = torch.arange(num_experts + 1, dtype=ids.dtype, device=ids.device)
    bounds = torch.searchsorted(ordered, experts)
    first, count = bounds[:-1], bounds.diff()
    ends = ((count + tokens - 1) // tokens).cumsum(0)
    tile = torch.arange(num_tiles, device=ids.device)
    expert = torch.searchsorted(ends, tile, right=True)
    used = expert < num_experts
    expert = expert.clamp(max=num_experts - 1)
    index = tile - (ends - (count + tokens - 1) // tokens)[expert]
    size = (count[expert] - index * tokens).clamp(0, tokens)
    tiles = torch.stack((expert.where(used, -1), first[expert] + index * tokens, size))
    return Groups(tiles.int(), order.int())
