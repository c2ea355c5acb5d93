"""Compile targets of record_tokens and checksum."""

from __future__ import annotations

from targets import Target

TARGETS = [
    *(
        Target(
            "record_tokens:_record_tokens_kernel",
            label="logprobs" if logprobs else "",
            types={
                "tokens_ptr": "*i64",
                "slots_ptr": "*i32",
                "logprobs_ptr": "*fp32",
                "failed_ptr": "*i1",
                "token_logprobs_ptr": "*fp32",
            },
            constants={"HAS_LOGPROBS": logprobs, "BLOCK": 64},
            num_warps=2,
            hot=True,
            aligned=False,
        )
        for logprobs in (False, True)
    ),
    Target(
        "checksum:_checksum_kernel",
        types={
            "words_ptr": "*i32",
            "checksum_ptr": "*i64",
            "num_words": "i64",
            "first_row": "i64",
        },
        constants={"MULTIPLIER_A": 0x45D9F3B, "MULTIPLIER_B": 0x119DE1F3, "BLOCK": 4096},
        num_warps=8,
    ),
]
