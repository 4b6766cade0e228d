"""PairwiseDots equals the textbook formula, forward and back, wherever a model may live."""

import pytest
import torch

from embark.trainers.torch.networks.dlrm import PairwiseDots


def textbook_dots(vectors: torch.Tensor) -> torch.Tensor:
    first, second = torch.triu_indices(vectors.shape[1], vectors.shape[1], offset=1)
    return torch.bmm(vectors, vectors.transpose(1, 2))[:, first, second]


@pytest.mark.parametrize("num_vectors", [1, 2, 3, 27, 201])
def test_dots_and_gradients_equal_the_textbook_formula(num_vectors):
    torch.manual_seed(0)
    vectors = torch.randn(5, num_vectors, 8, dtype=torch.float64, requires_grad=True)
    dots = PairwiseDots(num_vectors)(vectors)
    expected = textbook_dots(vectors)
    assert dots.shape == (5, num_vectors * (num_vectors - 1) // 2)
    torch.testing.assert_close(dots, expected)
    weights = torch.randn_like(expected)
    (grad,) = torch.autograd.grad((dots * weights).sum(), vectors)
    (expected_grad,) = torch.autograd.grad((expected * weights).sum(), vectors)
    torch.testing.assert_close(grad, expected_grad)


def test_gradients_pass_the_numeric_check_to_second_order():
    vectors = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    dots = PairwiseDots(4)
    assert torch.autograd.gradcheck(dots, vectors)
    assert torch.autograd.gradgradcheck(dots, vectors)


def test_autocast_computes_in_bfloat16_and_returns_float32_gradients():
    vectors = torch.randn(16, 9, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        dots = PairwiseDots(9)(vectors)
    dots.float().sum().backward()
    assert dots.dtype == torch.bfloat16
    assert vectors.grad.dtype == torch.float32
    torch.testing.assert_close(dots.float(), textbook_dots(vectors), rtol=0.05, atol=0.05)


def test_a_meta_module_infers_shapes_and_regains_its_index():
    with torch.device("meta"):
        dots = PairwiseDots(6)
    assert dots.pair_cells.is_meta
    assert dots(torch.empty(3, 6, 4, device="meta")).shape == (3, 15)
    dots = dots.to_empty(device="cpu")
    dots.reset_parameters()
    vectors = torch.randn(3, 6, 4)
    torch.testing.assert_close(dots(vectors), textbook_dots(vectors))


def test_explicit_device_wins_over_the_surrounding_default():
    with torch.device("meta"):
        dots = PairwiseDots(3, device="cpu")
    assert dots.pair_cells.device.type == "cpu"


def test_checkpoints_hold_nothing_of_the_index():
    assert PairwiseDots(5).state_dict() == {}


def test_no_vectors_is_refused():
    with pytest.raises(ValueError, match="at least one vector"):
        PairwiseDots(0)


def test_traced_module_is_scriptable_and_agrees():
    dots = PairwiseDots(5)
    scripted = torch.jit.script(torch.fx.symbolic_trace(dots))
    vectors = torch.randn(4, 5, 8)
    torch.testing.assert_close(scripted(vectors), dots(vectors))


def test_compiles_as_one_graph_with_equal_gradients():
    # "aot_eager" traces both directions as the compiler does and needs no C++ compiler.
    torch.manual_seed(0)
    dots = PairwiseDots(7)
    vectors = torch.randn(4, 7, 8, requires_grad=True)
    compiled = torch.compile(dots, backend="aot_eager", fullgraph=True)
    (grad,) = torch.autograd.grad(compiled(vectors).square().sum(), vectors)
    (expected,) = torch.autograd.grad(dots(vectors).square().sum(), vectors)
    torch.testing.assert_close(grad, expected)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(vectors), dots(vectors))


@pytest.mark.gpu
def test_dots_on_a_gpu_equal_the_cpu():
    vectors = torch.randn(4, 7, 8)
    on_gpu = PairwiseDots(7, device="cuda")(vectors.cuda())
    torch.testing.assert_close(on_gpu.cpu(), textbook_dots(vectors))


@pytest.mark.parametrize(("num_vectors", "dim"), [(2, 16), (3, 32), (5, 16), (9, 64), (27, 64), (40, 16)])
def test_training_takes_the_values_of_torchs_own_product(num_vectors, dim):
    """To the rounding of sums of `dim` products: without MKL another library than torch's may compute them."""
    vectors = torch.randn(33, num_vectors, dim, generator=torch.Generator().manual_seed(1))
    cells = torch.bmm(vectors, vectors.transpose(1, 2))
    first, second = torch.triu_indices(num_vectors, num_vectors, 1)
    dots = PairwiseDots(num_vectors)(vectors.requires_grad_())
    torch.testing.assert_close(dots, cells[:, first, second], rtol=1e-5, atol=1e-5)
