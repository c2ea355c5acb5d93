"""The sampler's definition: its random numbers, its statistics, its support as Hugging Face's."""

import itertools

import pytest
import torch

from torch_paged.ops.sample import sample_reference
from torch_paged.ops.sample.reference import _support, exponentials, philox

INF = float("inf")
VOCAB = 263
TEMPERATURES = (0.3, 0.7, 1.0, 1.5, 1e-5)
TOP_KS = (0, 1, 3, 50, VOCAB - 1, VOCAB, 1000000)
TOP_PS = (0.0, 1e-8, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0)
MIN_PS = (0.0, 0.05, 0.5, 1.0)


def _rows():
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(4, VOCAB, generator=g)
    return {
        "distinct": normal[0] * 2,
        "peaked": normal[1] * 8,
        "bfloat16": (normal[2] * 3).bfloat16().float(),  # a few ties
        "rounded": (normal[3] * 3).round(),  # many ties
        "two values": torch.randint(0, 2, (VOCAB,), generator=g).float(),
        "equal": torch.zeros(VOCAB),
    }


def _hugging_face_support(logits, temperature, top_k, top_p, min_p):
    """What the warpers leave, built under the conditions of _get_logits_processor."""
    processors = pytest.importorskip("transformers.generation.logits_process")
    warpers = []
    if temperature != 1.0:
        warpers.append(processors.TemperatureLogitsWarper(temperature))
    if top_k != 0:
        warpers.append(processors.TopKLogitsWarper(top_k))
    if top_p < 1.0:
        warpers.append(processors.TopPLogitsWarper(top_p))
    if min_p > 0:
        warpers.append(processors.MinPLogitsWarper(min_p))
    scores = logits
    for warper in warpers:
        scores = warper(None, scores)
    return scores > -INF


def _own_support(logits, temperature, top_k, top_p, min_p):
    num_rows = logits.shape[0]
    return _support(
        logits * (1.0 / torch.tensor(temperature)),
        torch.full((num_rows,), top_k),
        torch.full((num_rows,), top_p, dtype=torch.float64),
        torch.full((num_rows,), min_p, dtype=torch.float64),
    )


def _with_stable_sort(monkeypatch):
    unstable = torch.sort

    def sort(*args, **kwargs):
        return unstable(*args, **{**kwargs, "stable": True})

    monkeypatch.setattr(torch, "sort", sort)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_support_equals_hugging_face_in_all_combinations(temperature, monkeypatch):
    # Which of equal scores top-p cuts is left open by Hugging Face's unstable sort.
    _with_stable_sort(monkeypatch)
    logits = torch.stack(list(_rows().values()))
    for filters in itertools.product(TOP_KS, TOP_PS, MIN_PS):
        expected = _hugging_face_support(logits, temperature, *filters)
        assert torch.equal(_own_support(logits, temperature, *filters), expected), filters


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_as_many_of_each_value_are_kept_as_by_hugging_face_unchanged(temperature):
    rows = _rows()
    for filters in itertools.product(TOP_KS, TOP_PS, MIN_PS):
        for name, row in rows.items():
            expected = row[_hugging_face_support(row[None], temperature, *filters)[0]]
            kept = row[_own_support(row[None], temperature, *filters)[0]]
            assert torch.equal(kept.sort().values, expected.sort().values), (name, filters)


def test_different_parameters_in_one_batch_do_not_mix():
    row = _rows()["bfloat16"]
    combinations = list(itertools.product((0, 3, 50), (0.5, 0.9, 1.0), (0.0, 0.05)))
    together = _support(
        row.expand(len(combinations), -1),
        torch.tensor([c[0] for c in combinations]),
        torch.tensor([c[1] for c in combinations], dtype=torch.float64),
        torch.tensor([c[2] for c in combinations], dtype=torch.float64),
    )
    for kept, filters in zip(together, combinations, strict=True):
        assert torch.equal(kept, _own_support(row[None], 1.0, *filters)[0]), filters


# Known answers of Philox-4x32-10 (Salmon et al., Random123): counter, key, words.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS, ids=["0", "1", "pi"])
def test_philox_gives_the_known_answers(counter, key, words):
    seed = (key[1] << 32) | key[0]
    seed = torch.tensor(seed - (1 << 64) if seed >= 1 << 63 else seed)
    got = philox(seed, tuple(torch.tensor(c) for c in counter))
    assert tuple(word.item() for word in got) == words


def test_exponentials_are_distributed_as_such():
    numbers = exponentials(torch.arange(64), torch.arange(64, dtype=torch.int32), 5000).double()
    assert numbers.min() > 0 and numbers.max() < INF
    # Kolmogorov-Smirnov against 1 - exp(-x); 1.95 / sqrt(n) is passed once in a thousand.
    ordered = numbers.flatten().sort().values
    n = ordered.numel()
    ideal = torch.arange(1, n + 1, dtype=torch.float64) / n
    assert (1 - (-ordered).exp() - ideal).abs().max() < 1.95 / n**0.5


def test_small_exponentials_keep_their_digits():
    # The least of 2**18 numbers, about 4e-6, decides flat distributions over a large vocabulary:
    # -log(1 - u) in fp32 would know it to 6e-8 only, that is to 64 values below it.
    numbers = exponentials(torch.tensor([1]), torch.tensor([0]), 1 << 18)[0]
    small = numbers[numbers < 2e-4]
    assert small.numel() > 40 and small.unique().numel() == small.numel()


def test_exponentials_depend_on_seed_counter_and_token_alone():
    seeds, counters = torch.tensor([5, 5, 6, -5]), torch.tensor([0, 1, 0, 0])
    numbers = exponentials(seeds, counters, 40)
    assert all(not torch.equal(numbers[i], numbers[j]) for i in range(4) for j in range(i))
    # Nor on the vocabulary's size or on the batch.
    assert torch.equal(exponentials(seeds[2:3], counters[2:3], 37)[0], numbers[2, :37])


def test_counters_use_all_their_bits():
    counters = torch.tensor([1, 1 + (1 << 32), 1 + (1 << 33)])
    numbers = exponentials(torch.tensor([9, 9, 9]), counters, 8)
    assert not torch.equal(numbers[0], numbers[1]) and not torch.equal(numbers[1], numbers[2])


def _draw(logits, num_draws, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=11, start=0):
    """Tokens of `num_draws` successive counters of one slot's parameters."""

    def full(value, dtype):
        return torch.full((num_draws,), value, dtype=dtype)

    return sample_reference(
        logits.expand(num_draws, -1),
        torch.arange(num_draws, dtype=torch.int32),
        full(temperature, torch.float64),
        full(top_k, torch.int32),
        full(top_p, torch.float64),
        full(min_p, torch.float64),
        full(seed, torch.int64),
        torch.arange(start, start + num_draws, dtype=torch.int32),
    )


def _p_value(observed, expected):
    """Of Pearson's chi-square over cells that are expected at all."""
    cells = expected > 0
    assert observed[~cells].sum() == 0
    statistic = ((observed - expected)[cells] ** 2 / expected[cells]).sum()
    freedom = torch.tensor((cells.sum().item() - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic / 2).item()


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 1.7},
        {"temperature": 0.6, "top_k": 8},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=lambda f: ",".join(f) or "none",
)
def test_tokens_are_drawn_with_their_probabilities(filters):
    logits = torch.randn(1, 24, generator=torch.Generator().manual_seed(2)) * 1.5
    num_draws = 40000
    tokens = _draw(logits, num_draws, **filters)
    scores = logits / filters.get("temperature", 1.0)
    hugging_face = (
        1.0,
        filters.get("top_k", 0),
        filters.get("top_p", 1.0),
        filters.get("min_p", 0.0),
    )
    kept = _hugging_face_support(scores, *hugging_face)
    probabilities = scores.double().masked_fill(~kept, -INF).softmax(dim=1)[0]
    observed = torch.bincount(tokens, minlength=24).double()
    assert _p_value(observed, probabilities * num_draws) > 1e-3


def test_successive_draws_are_independent():
    num_draws = 40000
    tokens = _draw(torch.tensor([[0.0, 0.5, 1.0, -1.0]]), num_draws)
    probabilities = torch.tensor([0.0, 0.5, 1.0, -1.0]).double().softmax(dim=0)
    pairs = tokens[0::2] * 4 + tokens[1::2]
    expected = torch.outer(probabilities, probabilities).flatten() * (num_draws // 2)
    assert _p_value(torch.bincount(pairs, minlength=16).double(), expected) > 1e-3


def test_flat_draws_over_a_large_vocabulary_are_uniform():
    num_draws, vocab_size = 600, 1 << 15
    tokens = torch.cat([_draw(torch.zeros(1, vocab_size), 100, start=s * 100) for s in range(6)])
    observed = torch.bincount(tokens * 20 // vocab_size, minlength=20).double()
    expected = torch.full((20,), num_draws / 20, dtype=torch.float64)
    assert _p_value(observed, expected) > 1e-3


@pytest.mark.parametrize(
    "filters",
    [{"top_p": 0.0}, {"top_p": 1e-8}, {"top_k": 1}, {"temperature": 1e-5}, {"temperature": 1e-6}],
    ids=str,
)
def test_extremes_of_the_filters_equal_greedy(filters):
    logits = _rows()["distinct"][None]
    assert _draw(logits, 200, **filters).unique().tolist() == [logits.argmax().item()]


@pytest.mark.parametrize("top_k", [0, -1, VOCAB, 1000000])
def test_extremes_of_top_k_filter_nothing(top_k):
    logits = _rows()["distinct"][None]
    assert torch.equal(_draw(logits, 200, top_k=top_k), _draw(logits, 200))


def test_seeds_give_different_sequences_and_repeat():
    logits = _rows()["distinct"][None]
    sequences = [_draw(logits, 8, seed=seed).tolist() for seed in (7, 8, 9, 10)]
    assert len({tuple(sequence) for sequence in sequences}) == 4
    assert _draw(logits, 8, seed=7).tolist() == sequences[0]
