import math

import pytest
import torch

from regrow.accept.tiny import tiny_model
from regrow.config.schema import ModelConfig, RopeScaling
from regrow.model.llama import INIT_STD, Llama, init_weights, rope_frequencies_Q2, rotate, truncated_normal
from regrow.plan.mesh import Coordinates, MeshShape
from support.ragged import ragged_model
from support.reference_llama import reference_frequency, reference_logits

torch.set_num_threads(1)  # threads that wait for each other cost tiny models more than they save


def built(config: ModelConfig, seed: int = 0) -> Llama:
    with torch.device("meta"):
        model = Llama(config)
    model.to_empty(device="cpu")
    init_weights(model, seed)
    return model


@pytest.mark.parametrize(
    "config", [tiny_model(), tiny_model(tied=True), ragged_model()], ids=["tiny", "tied", "ragged"]
)
def test_logits_equal_an_independent_float64_reference(config):
    model = built(config)
    with torch.no_grad():  # larger than at initialisation, so that attention and gates are far from linear
        for parameter in model.parameters():
            parameter.mul_(5.0 if parameter.std() < 0.1 else 1.0)
    weights = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    tokens = torch.randint(config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    logits = model(tokens)
    for row, got in zip(tokens, logits, strict=True):
        want = reference_logits(config, weights, row)
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_rope_scaling_equals_values_worked_out_by_hand_for_llama_3_1():
    # theta 500000, heads of 128, factor 8 over a context of 8192, as Meta published it
    got = rope_frequencies_Q2(head_dim=128, theta=500000.0, scaling=RopeScaling(factor=8.0)).double()
    plain = [500000.0 ** (-i / 64) for i in range(64)]
    assert got[0] == 1.0
    # pair 28: wavelength 1956 < 8192 / 4, kept; pair 35: 8218 > 8192, divided by 8
    assert got[28].item() == pytest.approx(500000.0 ** (-28 / 64), rel=1e-6)
    assert got[35].item() == pytest.approx(500000.0 ** (-35 / 64) / 8, rel=1e-6)
    # pair 31: wavelength 3619.2, 2.26345 turns in 8192 tokens, blend 0.42115: 0.42115 + 0.57885 / 8 = 0.49351
    assert got[31].item() / plain[31] == pytest.approx(0.49351, abs=1e-5)


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rope_scaling_equals_metas_case_by_case_formula(factor, head_dim):
    scaling = RopeScaling(factor=factor)
    got = rope_frequencies_Q2(head_dim=head_dim, theta=500000.0, scaling=scaling)
    want = [reference_frequency(500000.0 ** (-2 * i / head_dim), scaling) for i in range(head_dim // 2)]
    torch.testing.assert_close(got, torch.tensor(want), rtol=1e-5, atol=0.0)


def test_rotation_pairs_a_heads_first_half_with_its_second_as_hugging_face_does():
    angle = torch.tensor([[0.5]])
    x = torch.tensor([[[[1.0, 0.0]]]])
    turned = rotate(x, angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)).flatten()
    torch.testing.assert_close(turned, torch.tensor([math.cos(0.5), math.sin(0.5)]))


def test_attention_scores_depend_on_distance_only():
    model = built(tiny_model())
    cos, sin = model.rope_BTQ(torch.arange(32)[None])
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0)).expand(2, 1, 32, 1, 8)
    scores = rotate(q, cos, sin)[0, :, 0] @ rotate(k, cos, sin)[0, :, 0].T
    for distance in (0, 3, 9):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)


def test_a_token_does_not_see_those_after_it():
    model = built(tiny_model())
    tokens = torch.arange(20)[None]
    changed = tokens.clone()
    changed[0, 12:] = 7
    assert torch.equal(model(tokens)[0, :12], model(changed)[0, :12])
    assert not torch.equal(model(tokens)[0, 12:], model(changed)[0, 12:])


def test_tied_model_has_no_output_parameter_and_no_persistent_buffer():
    names = set(built(tiny_model(tied=True)).state_dict())
    assert "output.weight" not in names
    assert "output.weight" in set(built(tiny_model()).state_dict())
    assert all(name.endswith(".weight") for name in names)


@pytest.mark.parametrize("tied", [True, False])
def test_initial_loss_is_the_logarithm_of_the_vocabulary(tied):
    model = built(ModelConfig(tied=tied))
    tokens = torch.randint(4096, (4, 65), generator=torch.Generator().manual_seed(0))
    loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(4096), abs=0.1)


def test_initial_weights_have_the_stated_spread_and_are_cut_at_three_deviations():
    model = built(ModelConfig())
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == 1).all()
            continue
        deep = name.endswith(("wo.weight", "w2.weight"))
        want = INIT_STD / math.sqrt(2 * (int(name.split(".")[1]) + 1)) if deep else INIT_STD
        want = 1.0 if name == "embed.weight" else want
        assert parameter.abs().max() <= 3 * want * (1 + 1e-6), name
        # cutting a normal at 3 deviations leaves 0.98658 of its deviation
        assert parameter.std().item() == pytest.approx(0.98658 * want, rel=0.02), name
        assert parameter.mean().abs() < 0.02 * want, name


def test_initialisation_depends_on_seed_and_name_and_on_nothing_drawn_before():
    first = dict(built(tiny_model(), seed=1).named_parameters())
    torch.manual_seed(123)
    again = dict(built(tiny_model(num_layers=3), seed=1).named_parameters())
    other = dict(built(tiny_model(), seed=2).named_parameters())
    for name, parameter in first.items():
        assert torch.equal(parameter, again[name]), name  # a third layer changes nothing in the first two
        if parameter.ndim > 1:
            assert not torch.equal(parameter, other[name]), name
    assert not torch.equal(first["layers.0.attention.wq.weight"], first["layers.1.attention.wq.weight"])


@pytest.mark.parametrize("num_threads", [1, 2])
def test_initialisation_does_not_depend_on_the_number_of_threads(num_threads):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        values = built(ModelConfig(num_layers=1)).embed.weight
        torch.set_num_threads(3 - num_threads)
        assert torch.equal(values, built(ModelConfig(num_layers=1)).embed.weight)
    finally:
        torch.set_num_threads(before)


def test_weights_are_drawn_on_the_host_whatever_the_device_is():
    """What a GPU draws depends on its kind. The device here has no generator of random numbers at all."""
    drawn = truncated_normal((3, 4), 0.02, "seed", torch.device("meta"))
    assert (drawn.shape, drawn.dtype, drawn.device.type) == ((3, 4), torch.float32, "meta")


@pytest.mark.parametrize("mesh", [MeshShape(1, 7), MeshShape(2, 3, 2)])
def test_each_rank_draws_its_box_of_the_same_weights(mesh):
    config = ModelConfig(vocab_size=8192, dim=40, num_layers=1, num_heads=4, num_kv_heads=2, ffn_dim=7000)
    whole = dict(built(config, seed=3).named_parameters())  # of which some take several blocks of the initialisation
    for rank in range(mesh.world_size):
        with torch.device("meta"):
            model = Llama(config)
        model.place(Coordinates(mesh, rank))
        for name, box in model.boxes.items():
            module, _, parameter = name.rpartition(".")
            setattr(model.get_submodule(module), parameter, torch.nn.Parameter(torch.empty(box.sizes, device="meta")))
        model.to_empty(device="cpu")
        init_weights(model, 3)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, whole[name][model.boxes[name].slices]), f"{name} of rank {rank}"
