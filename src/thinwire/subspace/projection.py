"""Projection onto a subspace S = Col(U), and how far something is from it.

Legend: U_DK has orthonormal columns; the model dimension D is axis 0 of a writer's weight (the
columns of W lie in S) and axis 1 of an embedding table (its rows lie in S).
"""

import torch
from torch import Tensor


def project(tensor: Tensor, basis_DK: Tensor, axis: int) -> Tensor:
    """The part of a matrix that lies in S along its model dimension."""
    if axis == 0:
        return basis_DK @ (basis_DK.T @ tensor)
    return (tensor @ basis_DK) @ basis_DK.T


def drift(tensor: Tensor, basis_DK: Tensor, axis: int) -> float:
    """How much of a matrix lies outside S: ||W - P W|| / ||W||, 0 for a zero matrix."""
    size = torch.linalg.vector_norm(tensor)
    if not size:
        return 0.0
    outside = tensor - project(tensor, basis_DK, axis)
    return float(torch.linalg.vector_norm(outside) / size)


def orthonormality_error(basis_DK: Tensor) -> float:
    """||U^T U - I||, largest entry."""
    gram_KK = basis_DK.T @ basis_DK
    identity = torch.eye(gram_KK.shape[0], dtype=gram_KK.dtype, device=gram_KK.device)
    return float((gram_KK - identity).abs().max())
