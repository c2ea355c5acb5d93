from __future__ import annotations

import dataclasses

import pytest

from torch_paged.report import (
    CallReport,
    Report,
    SlotRow,
    Stats,
    format_bytes,
    merge_layers,
)


def llama_rows(num_layers: int, odd_layer: int | None = None) -> list[SlotRow]:
    rows = [SlotRow("model.embed_tokens", "fused")]
    for i in range(num_layers):
        odd = i == odd_layer
        why = "Linear4bit is not a plain nn.Linear with a floating point weight" if odd else ""
        rows.append(SlotRow(f"model.layers.{i}.self_attn.q_proj", "fused"))
        rows.append(SlotRow(f"model.layers.{i}.mlp.down_proj", "opaque" if odd else "fused", why))
    return [*rows, SlotRow("lm_head", "generic", "tied")]


def test_equal_layers_merge_into_one_row() -> None:
    assert [row.module for row in merge_layers(llama_rows(30))] == [
        "model.embed_tokens",
        "model.layers.0-29.self_attn.q_proj",
        "model.layers.0-29.mlp.down_proj",
        "lm_head",
    ]


def test_odd_layer_keeps_its_own_row_and_reason() -> None:
    merged = merge_layers(llama_rows(30, odd_layer=7))
    assert [(row.module, row.kind) for row in merged if "down_proj" in row.module] == [
        ("model.layers.0-6,8-29.mlp.down_proj", "fused"),
        ("model.layers.7.mlp.down_proj", "opaque"),
    ]
    assert merged[3].why.startswith("Linear4bit")


def test_only_the_first_index_of_a_name_is_merged() -> None:
    rows = [SlotRow(f"layers.{i}.experts.{j}", "fused") for i in range(2) for j in range(2)]
    assert [row.module for row in merge_layers(rows)] == [
        "layers.0-1.experts.0",
        "layers.0-1.experts.1",
    ]


def test_trailing_index_is_merged() -> None:
    rows = [SlotRow(f"transformer.h.{i}", "opaque", "x") for i in (0, 2, 3)]
    assert merge_layers(rows) == [SlotRow("transformer.h.0,2-3", "opaque", "x")]


def test_report_prints_a_table_and_then_the_plan() -> None:
    report = Report(
        tier="fused",
        slots=llama_rows(30, odd_layer=7),
        plan="embed -> h0\nrms_norm h0 -> h1\n",
        last_call=CallReport("fused", "lagged", ("a streamer is attached",)),
    )
    text = str(report)
    assert text.splitlines()[:2] == [
        "tier        fused",
        "last call   fused path, lagged loop; a streamer is attached",
    ]
    assert "module" in text.splitlines()[3] and "why" in text.splitlines()[3]
    assert text.endswith("plan\n  embed -> h0\n  rms_norm h0 -> h1")
    assert text.index("lm_head") < text.index("plan\n")


def test_report_fits_80_columns_and_loses_no_word() -> None:
    reason = "the class overrides _sample, so that its own decoding loop has to run unchanged"
    report = Report(
        tier="eager",
        slots=llama_rows(30, odd_layer=7),
        reasons=[reason, "second " * 30],
    )
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    assert " ".join(str(report).split()).count(reason) == 1
    assert sum(line.split().count("second") for line in lines) == 30
    header = next(i for i, line in enumerate(lines) if line.startswith("module"))
    column = lines[header].index("why")
    why = " ".join(line[column:].strip() for line in lines[header:] if line[column:])
    assert "Linear4bit is not a plain nn.Linear with a floating point weight" in why


def test_fresh_report_says_that_there_was_no_call() -> None:
    assert str(Report(tier="fused")) == "tier        fused\nlast call   none yet"


def test_eager_call_names_no_loop() -> None:
    assert str(CallReport("eager", reasons=("num_beams=4",))) == "eager path; num_beams=4"


def test_stats_print_their_numbers_in_80_columns() -> None:
    stats = Stats(
        tokens=1_234_567,
        steps=1_000,
        ms_per_step=0.53119,
        kv_blocks_total=100,
        kv_blocks_used=20,
        kv_bytes=3 << 30,
        preemptions=1_002,
        swaps=1_001,
        host_bytes=4 << 30,
        graphs=5,
        graph_bytes=1 << 20,
        capture_seconds=1.234,
        fallbacks={"num_beams=4 asks for beam search": 3, "word " * 30: 1},
        recaptures=2,
    )
    text = str(stats)
    for part in (
        "1,234,567 tokens in 1,000 steps, 0.531 ms a step",
        "20 of 100 blocks used, 3.0 GiB",
        "preempted   1,002 times, 1,001 swapped to 4.0 GiB of host memory",
        "5 held, 1.0 MiB, captured in 1.23 s, 2 captured again",
        "fallbacks   3x num_beams=4 asks for beam search\n            1x word",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 80


def test_fresh_stats_print_without_a_mean() -> None:
    text = str(Stats())
    assert "0 tokens in 0 steps\n" in text and "ms" not in text
    assert text.endswith("fallbacks   none")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 << 20, "1.5 GiB"),
        (5 << 40, "5.0 TiB"),
    ],
)
def test_bytes_print_with_a_binary_unit(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize("record", [Report(tier="fused"), Stats(), CallReport("fused")], ids=repr)
def test_record_is_frozen(record: object) -> None:
    name = dataclasses.fields(record)[0].name  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, name, "other")
