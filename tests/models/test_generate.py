"""Generation: the KV cache changes nothing, sampling obeys its settings."""

import pytest
import torch

from mcore_models.generate import generate, nucleus
from mcore_models.kv_cache import KVCache
from mcore_models.specs import StageSpec


def prompt(batch=2, length=5):
    return torch.randint(0, 101, (batch, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("cuts", [(12,), (1,) * 12, (5, 1, 4, 2)])
def test_cached_logits_equal_the_whole_pass(tiny_fields, build, family, cuts):
    model = build({**tiny_fields[family], "init_method_std": 0.3})
    tokens = prompt(length=12)
    cache = KVCache(2, 12)
    with torch.no_grad():
        whole = model.logits(model(tokens))
        parts = [model.logits(model(part, cache=cache)) for part in tokens.split(list(cuts), dim=1)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)
    assert cache.length == 12


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_greedy_equals_argmax_without_a_cache(tiny_fields, build, family):
    model = build({**tiny_fields[family], "init_method_std": 0.3})
    tokens = prompt()
    new = torch.stack(list(generate(model, tokens, max_new_tokens=9)), dim=1)
    for _ in range(9):
        with torch.no_grad():
            following = model.logits(model(tokens))[-1].argmax(-1)
        tokens = torch.cat([tokens, following.unsqueeze(1)], dim=1)
    assert torch.equal(new, tokens[:, 5:])
    assert len(set(new.flatten().tolist())) > 2


def test_sampling_is_a_function_of_its_seed_and_touches_no_global_generator(tiny_fields, build):
    model = build({**tiny_fields["llama"], "init_method_std": 0.3})
    state = torch.get_rng_state()

    def draw(seed):
        return torch.stack(list(generate(model, prompt(), max_new_tokens=12, temperature=1.0, seed=seed)))

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert torch.equal(torch.get_rng_state(), state)


def test_nucleus_keeps_the_smallest_set_that_holds_top_p():
    probabilities = torch.tensor([[0.1, 0.5, 0.15, 0.25], [0.97, 0.01, 0.01, 0.01]])
    assert nucleus(probabilities, 0.7).gt(0).tolist() == [[False, True, False, True], [True, False, False, False]]
    assert nucleus(probabilities, 0.75).gt(0).tolist() == [[False, True, False, True], [True, False, False, False]]
    assert nucleus(probabilities, 0.8).gt(0).tolist() == [[False, True, True, True], [True, False, False, False]]
    assert nucleus(probabilities, 0.01).gt(0).sum(1).tolist() == [1, 1]
    assert nucleus(probabilities, 1.0) is probabilities


def test_low_temperature_and_small_top_p_are_greedy(tiny_fields, build):
    model = build({**tiny_fields["gpt"], "init_method_std": 0.3})
    greedy = torch.stack(list(generate(model, prompt(), max_new_tokens=6)))
    cold = torch.stack(list(generate(model, prompt(), max_new_tokens=6, temperature=1e-4)))
    narrow = torch.stack(list(generate(model, prompt(), max_new_tokens=6, temperature=1.0, top_p=1e-6)))
    assert torch.equal(greedy, cold)
    assert torch.equal(greedy, narrow)


def test_eod_ends_a_sequence_and_then_the_batch(tiny_fields, build):
    model = build({**tiny_fields["gpt"], "init_method_std": 0.3})
    free = torch.stack(list(generate(model, prompt(), max_new_tokens=8)))
    eod = int(free[2, 0])
    first = int((free[:, 0] == eod).nonzero()[0])
    ended = torch.stack(list(generate(model, prompt(), max_new_tokens=8, eod=eod)))
    assert (ended[first:, 0] == eod).all()
    alone = list(generate(model, prompt()[:1], max_new_tokens=8, eod=eod))
    assert len(alone) == first + 1


@pytest.mark.parametrize(
    ("tokens", "options", "words"),
    [
        (prompt(), {"max_new_tokens": 60}, "5 prompt tokens and 60 new ones exceed max-position-embeddings 64"),
        (prompt(), {"max_new_tokens": 0}, "max-new-tokens 0"),
        (prompt(), {"max_new_tokens": 1, "temperature": -1.0}, "temperature -1.0"),
        (prompt(), {"max_new_tokens": 1, "top_p": 0.0}, "top-p 0.0"),
        (torch.tensor([[101]]), {"max_new_tokens": 1}, "101..101 are outside the vocabulary of 101"),
        (torch.zeros(1, 0, dtype=torch.int64), {"max_new_tokens": 1}, "at least one token"),
    ],
)
def test_bad_requests_are_refused_at_once(tiny_fields, build, tokens, options, words):
    with pytest.raises(ValueError, match=words):
        generate(build(tiny_fields["gpt"]), tokens, **options)


def test_a_stage_cannot_generate(tiny_fields, build):
    stage = build(tiny_fields["gpt"], stage=StageSpec(0, 1, True, False))
    with pytest.raises(ValueError, match="whole model"):
        generate(stage, prompt(), max_new_tokens=1)


def test_cache_refuses_more_than_its_capacity(tiny_fields, build):
    model = build(tiny_fields["gpt"])
    with pytest.raises(ValueError, match="6 positions exceed the KV cache's capacity of 5"):
        model(prompt(length=6), cache=KVCache(2, 5))
