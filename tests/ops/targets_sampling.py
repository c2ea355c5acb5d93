"""Compile targets of argmax, advance, sample, log-probabilities, penalties and min_tokens."""

from __future__ import annotations

from targets import Target

_STATE = {"slots_ptr": "*i32", "temperature_ptr": "*fp64", "top_k_ptr": "*i32"}
_STATE |= {"seeds_ptr": "*i64", "counters_ptr": "*i32"}
_SUMMARY = {"greedy_words_ptr": "*i64", "race_words_ptr": "*i64", "tile_max_ptr": "*fp32"}
_SUMMARY |= {"group_max_ptr": "*fp32", "group_sum_ptr": "*fp32", "num_groups": "i32:16"}
_GROUPS = {"GROUPS": 32, "GROUP": 64, "SMALL_K": 128}

TARGETS = [
    *(
        Target(
            "argmax:_argmax_tiles_kernel",
            label=label,
            types={"logits_ptr": logits, "words_ptr": "*i64", "vocab_size": "i32:16"},
            constants={"BLOCK": block},
            hot=True,
        )
        for label, logits, block in (
            ("half-few", "*half", 1024),
            ("half-many", "*half", 4096),
            ("fp32", "*fp32", 4096),
        )
    ),
    Target(
        "argmax:_argmax_tiles_kernel",
        label="unaligned",
        types={"words_ptr": "*i64"},
        constants={"BLOCK": 4096},
        aligned=False,
        hot=True,
    ),
    Target(
        "argmax:_argmax_rows_kernel",
        types={"words_ptr": "*i64", "tokens_ptr": "*i64"},
        constants={"BLOCK": 256},
        num_warps=1,
        hot=True,
    ),
    *(
        Target(
            "advance:_advance_kernel",
            label=f"rows{block}-eos{eos}",
            types={
                "tokens_ptr": "*i64",
                "slots_ptr": "*i32",
                "last_token_ptr": "*i64",
                "positions_ptr": "*i32",
                "context_lens_ptr": "*i32",
                "num_generated_ptr": "*i32",
                "max_new_tokens_ptr": "*i32",
                "finished_ptr": "*i8",
                "eos_ids_ptr": "*i64",
                "pad_token_ptr": "*i64",
                "output_ptr": "*i64",
                "num_unfinished_ptr": "*i32",
            },
            constants={"EOS_BLOCK": eos, "BLOCK": block},
            num_warps=max(1, block // 128, block * eos // 512),
            hot=True,
        )
        for block, eos in ((32, 8), (32, 64), (1024, 2))
    ),
    *(
        Target(
            "sample.kernels:_sample_tiles_kernel",
            label=label,
            types={"logits_ptr": logits, "vocab_size": "i32:16", **_STATE, **_SUMMARY},
            constants=_GROUPS,
            options={"enable_fp_fusion": False},
            hot=True,
        )
        for label, logits in (("half", "*half"), ("fp32", "*fp32"))
    ),
    *(
        Target(
            "sample.kernels:_sample_rows_kernel",
            label=label,
            types={
                "logits_ptr": logits,
                "top_p_ptr": "*fp64",
                "min_p_ptr": "*fp64",
                "tile_flags_ptr": "*i32",
                "list_ptr": "*i32",
                "tokens_ptr": "*i64",
                "support_ptr": "*i64",
                "vocab_size": "i32:16",
                **_STATE,
                **_SUMMARY,
            },
            constants={
                "HAS_SUPPORT": has_support,
                **_GROUPS,
                "TILES_BLOCK": 128,
                "GROUPS_BLOCK": 4096,
                "LIST_BLOCK": 1024,
                "LISTED": 64,
                "SHIFT": shift,
            },
            num_warps=16,
            options={"enable_fp_fusion": False},
            hot=True,
        )
        for label, logits, shift, has_support in (
            ("half", "*half", 16, False),
            ("fp32", "*fp32", 0, False),
            ("fp32-support", "*fp32", 0, True),
        )
    ),
    *(
        Target(
            "sample.scores:_scores_kernel",
            label=label,
            types={
                "logits_ptr": logits,
                "min_p_ptr": "*fp64",
                "support_ptr": "*i64",
                "scores_ptr": "*fp32",
                "vocab_size": "i32:16",
                "slots_ptr": "*i32",
                "temperature_ptr": "*fp64",
            },
            constants={"BLOCK": 2048, "SHIFT": shift},
            options={"enable_fp_fusion": False},
            hot=True,
        )
        for label, logits, shift in (("half", "*half", 16), ("fp32", "*fp32", 0))
    ),
    *(
        Target(
            "token_logprobs:_logprob_tiles_kernel",
            label=label,
            types={"logits_ptr": logits, "maxima_ptr": "*fp32", "sums_ptr": "*fp32"},
            constants={"BLOCK": 4096},
            hot=True,
        )
        for label, logits in (("half", "*half"), ("fp32", "*fp32"))
    ),
    Target(
        "token_logprobs:_logprob_rows_kernel",
        types={
            "tokens_ptr": "*i64",
            "maxima_ptr": "*fp32",
            "sums_ptr": "*fp32",
            "logprobs_ptr": "*fp32",
        },
        constants={"BLOCK": 64},
        num_warps=1,
        hot=True,
    ),
    *(
        Target(
            "top_logprobs:_top_tiles_kernel",
            label=label,
            types={
                "logits_ptr": logits,
                "words_ptr": "*i64",
                "maxima_ptr": "*fp32",
                "sums_ptr": "*fp32",
            },
            constants={"BLOCK": 4096},
            hot=True,
        )
        for label, logits in (("half", "*half"), ("fp32", "*fp32"))
    ),
    *(
        Target(
            "top_logprobs:_top_rows_kernel",
            label=f"{words}",
            types={
                "words_ptr": "*i64",
                "maxima_ptr": "*fp32",
                "sums_ptr": "*fp32",
                "ids_ptr": "*i32",
                "logprobs_ptr": "*fp32",
            },
            constants={"TILES_BLOCK": tiles, "WORDS_BLOCK": words},
            num_warps=1,
            hot=True,
        )
        for tiles, words in ((32, 1024), (64, 2048))
    ),
    Target(
        "penalties:_mark_seen_kernel",
        types={"seen_mask_ptr": "*i32", "slots_ptr": "*i32", "tokens_ptr": "*i64"},
        constants={"BLOCK": 256},
        hot=True,
    ),
    *(
        Target(
            "penalties:_edit_members_kernel",
            label="suppress" if suppress else "penalise",
            types={"mask_ptr": "*i32", "slots_ptr": "*i32", "penalty_ptr": penalty},
            constants={"SUPPRESS": suppress, "WORDS": 128},
            hot=True,
        )
        for suppress, penalty in ((True, "*i32"), (False, "*fp64"))
    ),
    Target(
        "min_tokens:_min_tokens_kernel",
        types={
            "slots_ptr": "*i32",
            "num_generated_ptr": "*i32",
            "min_new_tokens_ptr": "*i32",
            "eos_ids_ptr": "*i64",
        },
        constants={"BLOCK": 4},
        num_warps=1,
        hot=True,
    ),
]
