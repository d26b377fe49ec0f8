"""Attention within the documents of a row: the row against each of its documents alone."""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from regrow.accept.tiny import tiny_model
from regrow.config.schema import ActivationCheckpoint, ModelConfig, ParallelConfig
from regrow.model import llama
from regrow.model.attention import attend, block_mask, document_starts_BT, mask_B1PT, mask_of, take_BP
from regrow.model.llama import Llama
from regrow.parallel.apply import build_model
from regrow.plan.share import Share
from regrow.train.step import split_rows, sum_cross_entropy
from support.ragged import ragged_model
from support.reference_llama import reference_logits

torch.set_num_threads(1)  # threads that wait for each other cost tiny models more than they save

EOT = 3
ROWS = {
    "two documents": [EOT, 11, 12, 13, 14, EOT, 21, 22, 23, 24, 25, 26],
    "from the middle of a document": [11, 12, 13, EOT, 21, 22, 23, 24, EOT, 31, 32, 33],
    "empty documents": [11, 12, EOT, EOT, EOT, 21, 22, 23, EOT, 31, 32, EOT],
    "no end of text": [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22],
    "nothing else": [EOT] * 12,
}
TOKENS = torch.tensor(list(ROWS.values()))


def built(config: ModelConfig, *, within: bool, mode: ActivationCheckpoint = ActivationCheckpoint.none) -> Llama:
    model = build_model(
        dataclasses.replace(config, document_attention=within),
        ParallelConfig(activation_checkpoint=mode),
        mesh=None,
        device="cpu",
        seed=0,
        eot_id=EOT if within else None,
    )
    with torch.no_grad():  # larger than at initialisation, so that attention is far from uniform
        for parameter in model.parameters():
            parameter.mul_(5.0 if parameter.std() < 0.1 else 1.0)
    return model


def documents(row: Tensor) -> list[slice]:
    """The documents of a row; all but perhaps the first begin with the end-of-text token."""
    begins = [t for t, token in enumerate(row.tolist()) if token == EOT or t == 0]
    return [slice(begin, end) for begin, end in itertools.pairwise([*begins, len(row)])]


def test_a_document_begins_at_its_end_of_text_token_or_with_the_row():
    assert document_starts_BT(TOKENS, EOT).tolist() == [
        [0, 0, 0, 0, 0, 5, 5, 5, 5, 5, 5, 5],
        [0, 0, 0, 3, 3, 3, 3, 3, 8, 8, 8, 8],
        [0, 0, 2, 3, 4, 4, 4, 4, 8, 8, 8, 11],
        [0] * 12,
        list(range(12)),
    ]


@pytest.mark.parametrize("config", [tiny_model(), ragged_model(tied=True)], ids=["tiny", "ragged, tied"])
def test_a_packed_rows_logits_are_those_of_each_document_alone(config):
    within, plain = built(config, within=True), built(config, within=False)
    weights = {name: parameter.detach().double() for name, parameter in plain.named_parameters()}
    for row, got in zip(TOKENS, within(TOKENS), strict=True):
        for part in documents(row):
            alone = plain(row[None, part])[0]
            torch.testing.assert_close(got[part], alone, rtol=1e-5, atol=1e-5 * alone.abs().max().item())
            exact = reference_logits(config, weights, row[part])
            assert (got[part] - exact).abs().max() <= 1e-5 * exact.abs().max()
    # without it the documents before do matter
    assert (plain(TOKENS[:1])[0, 5:] - within(TOKENS[:1])[0, 5:]).abs().max() > 0.01


def test_a_documents_loss_has_no_gradient_at_all_in_another_documents_tokens():
    model, row = built(tiny_model(), within=True), TOKENS[1:2]
    embedded: list[Tensor] = []
    model.embed.register_forward_hook(lambda module, args, out: embedded.append(out.requires_grad_()))
    logits = model(row)
    for part in documents(row[0]):
        (grad,) = torch.autograd.grad(logits[0, part].logsumexp(-1).sum(), embedded[0], retain_graph=True)
        touched = grad[0].abs().sum(-1) > 0
        assert touched.nonzero().flatten().tolist() == list(range(len(row[0])))[part]


def test_the_loss_counts_every_real_next_token_the_end_of_text_too():
    inputs, targets = split_rows(TOKENS[:1])
    model = built(tiny_model(), within=True)
    logits = model(inputs)
    want = -sum(logits[0, t].log_softmax(-1)[TOKENS[0, t + 1]] for t in range(11))
    torch.testing.assert_close(sum_cross_entropy(logits, targets), want)


def test_one_document_in_a_row_is_plain_causal_attention():
    row = TOKENS[3:4]
    within, plain = built(tiny_model(), within=True), built(tiny_model(), within=False)
    torch.testing.assert_close(within(row), plain(row), rtol=1e-5, atol=1e-5)


def test_positions_count_from_each_documents_beginning(monkeypatch):
    model, seen = built(tiny_model(), within=True), []
    rope = model.rope_BTQ
    monkeypatch.setattr(model, "rope_BTQ", lambda positions: (seen.append(positions.tolist()), rope(positions))[1])
    model(TOKENS[:3])
    assert seen[0] == [
        [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6],
        [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3],
        [0, 1, 0, 0, 0, 1, 2, 3, 0, 1, 2, 0],
    ]


def test_weights_and_their_names_do_not_depend_on_the_switch():
    within, plain = (built(tiny_model(), within=on).state_dict() for on in (True, False))
    assert list(within) == list(plain)
    assert all(torch.equal(within[name], plain[name]) for name in plain)


def test_the_switch_and_the_end_of_text_token_come_together():
    with pytest.raises(AssertionError, match="eot_id=None"):
        Llama(dataclasses.replace(tiny_model(), document_attention=True))
    with pytest.raises(AssertionError, match="document_attention=False"):
        Llama(tiny_model(), EOT)


@pytest.mark.parametrize("mode", [ActivationCheckpoint.selective, ActivationCheckpoint.full])
def test_recomputing_activations_changes_no_bit_of_the_gradients(mode):
    grads = []
    for each in (ActivationCheckpoint.none, mode):
        model = built(tiny_model(), within=True, mode=each)
        inputs, targets = split_rows(TOKENS)
        sum_cross_entropy(model(inputs), targets).backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


# flex_attention is what a GPU runs; on CPU torch has it for inference, and not fused
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
class TestFlexAttention:
    @pytest.mark.parametrize("num_tokens", [2, 12, 300])  # 300: more than one block of 128
    def test_allows_what_the_mask_allows(self, num_tokens):
        tokens = torch.randint(40, (3, num_tokens), generator=torch.Generator().manual_seed(0))
        starts = document_starts_BT(tokens, EOT)
        places = starts, torch.arange(num_tokens), num_tokens
        mask, blocks = mask_B1PT(*places), block_mask(*places)
        q, k, v = (
            torch.randn(3, heads, num_tokens, 16, generator=torch.Generator().manual_seed(heads)) for heads in (6, 2, 2)
        )
        torch.testing.assert_close(attend(q, k, v, blocks), attend(q, k, v, mask), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("within", [False, True], ids=["whole rows", "documents"])
    def test_gives_each_rank_that_shares_rows_what_it_would_have_of_all(self, within):
        tokens = torch.randint(40, (2, 600), generator=torch.Generator().manual_seed(0))
        every = document_starts_BT(tokens, EOT) if within else torch.zeros_like(tokens[:1])  # as `Llama.places` has it
        q, k, v = (
            torch.randn(2, heads, 600, 16, generator=torch.Generator().manual_seed(heads)) for heads in (6, 2, 2)
        )
        want = attend(q, k, v, mask_B1PT(every, torch.arange(600), 600))
        for share in (Share(rank, cp=3) for rank in range(3)):
            at, starts = take_BP(torch.arange(600)[None], share)[0], take_BP(every, share)
            for mask in (block_mask(starts, at, 600), mask_B1PT(starts, at, 600)):
                torch.testing.assert_close(attend(q[:, :, at], k, v, mask), want[:, :, at], rtol=1e-5, atol=1e-5)

    def test_skips_blocks_that_no_token_of_a_share_sees(self):
        share, every = Share(rank=0, cp=2), torch.zeros(1, 512, dtype=torch.int64)
        at = take_BP(torch.arange(512)[None], share)[0]
        blocks = block_mask(take_BP(every, share), at, 512).to_dense().squeeze().tolist()
        assert blocks == [[1, 0, 0, 0], [1, 1, 1, 1]]

    def test_skips_blocks_between_which_no_document_reaches(self):
        tokens = torch.ones(1, 512, dtype=torch.int64)
        tokens[0, ::128] = EOT
        blocks = block_mask(document_starts_BT(tokens, EOT), torch.arange(512), 512)
        assert blocks.to_dense().squeeze().tolist() == torch.eye(4).tolist()

    def test_gives_the_models_logits(self, monkeypatch):
        model = built(tiny_model(), within=True)
        with torch.no_grad():
            want = model(TOKENS)
            monkeypatch.setattr(llama, "mask_of", block_mask)
            torch.testing.assert_close(model(TOKENS), want, rtol=1e-5, atol=1e-5)

    def test_is_not_what_a_cpu_runs(self):
        length = TOKENS.size(1)
        assert isinstance(mask_of(document_starts_BT(TOKENS, EOT), torch.arange(length), length), Tensor)
