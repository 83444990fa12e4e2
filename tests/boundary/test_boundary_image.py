"""The boundary of images: pixels cross as tokens, and layers never see that they did."""

import pytest
import torch
from torch import Tensor, nn

from thinwire.boundary import ImageBoundary
from thinwire.boundary.image import as_from_a_cut

SHAPE = (2, 5, 3, 3)  # images, channels, pixels a side


def planes(seed: int = 0) -> Tensor:
    """Laid out as a stem lays them out."""
    drawn = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    return drawn.contiguous(memory_format=torch.channels_last)


def test_a_row_is_a_pixel_with_its_channels() -> None:
    boundary, x_BCSS = ImageBoundary(), planes()
    z_BPC = boundary.encode(x_BCSS, None)
    assert tuple(z_BPC.shape) == (2, 9, 5)
    assert z_BPC.is_contiguous()
    for row in range(3):
        for column in range(3):
            assert torch.equal(z_BPC[:, 3 * row + column], x_BCSS[:, :, row, column])
    decoded = boundary.decode(z_BPC, None)
    assert torch.equal(decoded, x_BCSS) and decoded.stride() == x_BCSS.stride()
    assert decoded.data_ptr() == z_BPC.data_ptr() == x_BCSS.data_ptr(), "nothing was copied"


def test_planes_in_another_layout_cross_too() -> None:
    boundary, x_BCSS = ImageBoundary(), planes().contiguous()
    z_BPC = boundary.encode(x_BCSS, None)
    assert z_BPC.is_contiguous() and torch.equal(boundary.decode(z_BPC, None), x_BCSS)


def test_the_gradient_crosses_unchanged_and_in_the_layout_of_planes() -> None:
    boundary, seen = ImageBoundary(), []
    x_BCSS = planes().requires_grad_()
    sent_BPC = boundary.encode(x_BCSS, None)
    x_BCSS.register_hook(lambda gradient: seen.append(gradient.stride()))
    received_BPC = sent_BPC.detach().requires_grad_()
    boundary.decode(received_BPC, None).backward(planes(1))
    sent_BPC.backward(received_BPC.grad)
    assert x_BCSS.grad is not None and torch.equal(x_BCSS.grad, planes(1))
    assert seen == [planes().stride()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_convolutions_on_either_side_give_the_same_bits(dtype: torch.dtype) -> None:
    """Through a cut the gradient must be added up in the order in which it is without one."""
    torch.manual_seed(0)
    below, above = (nn.Conv2d(8, 8, 3, padding=1, bias=False).to(dtype) for _ in range(2))
    image = torch.randn(4, 8, 8, 8, dtype=dtype).contiguous(memory_format=torch.channels_last)
    boundary, found = ImageBoundary(), []
    for is_cut in (False, True):
        x = torch.relu(below(image))
        if is_cut:
            x = boundary.decode(boundary.encode(x, None), None)
        torch.relu(above(x)).square().sum().backward()
        found.append([layer.weight.grad for layer in (below, above)])
        for layer in (below, above):
            layer.weight.grad = None
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("shape", [(2, 1, 3, 3), (2, 5, 1, 1), (1, 1, 1, 1), (2, 5, 3, 3)])
def test_what_a_model_lays_out_is_what_a_cut_delivers(shape: tuple[int, ...]) -> None:
    """Also of one channel or one pixel, where torch takes either layout for channels_last."""
    x_BCSS = torch.randn(shape)
    boundary = ImageBoundary()
    received = boundary.decode(boundary.encode(x_BCSS, None), None)
    laid_out = as_from_a_cut(x_BCSS)
    assert torch.equal(laid_out, x_BCSS) and laid_out.stride() == received.stride()
